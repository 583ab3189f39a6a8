"""The C function of a program, in LLVM IR, around its entry for a block of words.

It checks the sizes, computes those that follow from them, writes the block, and calls
the entry. Beside it are functions for the shapes of results, for the size of the
workspace, and for the texts of errors.

What the program writes to its arguments is written to the workspace first, and copied
when nothing can fail any more.
"""

from collections.abc import Sequence
from itertools import chain

from hopflow.compiler.cpu.memory import ProgramMemory
from hopflow.compiler.cpu.statements import StatementEmitter
from hopflow.compiler.cpu.stubs import HEADER, OUT_OF_MEMORY, ROOM, WORKSPACE
from hopflow.compiler.cpu.unit import Unit
from hopflow.compiler.llvm.module import Function, symbol
from hopflow.compiler.llvm.types import register_type
from hopflow.compiler.reuse import ALIGNMENT, size_in_bytes
from hopflow.export.native.parameters import NDArray, Parameter, Parameters
from hopflow.export.native.preamble import Preamble
from hopflow.export.native.room import replaced, room, rounded
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr, Var
from hopflow.loop_ir.program import Program


class Entry:
    """The C functions of a program, in the module of a unit that has its code.

    name   of the function; those beside it are `<name>_sizes`, `<name>_workspace` and
           `<name>_error_text`
    """

    def __init__(
        self,
        name: str,
        unit: Unit,
        program: Program,
        parameters: Parameters,
        preamble: Preamble,
    ) -> None:
        self.name, self.unit, self.program = name, unit, program
        self.parameters, self.preamble = parameters, preamble
        self.room = room(program, unit.target)
        self._data = 0  # the number of the next tensor that the program holds

    def define(self) -> None:
        """Define all functions, and the data that they read."""
        self._define_call()
        if shaped(self.parameters):
            self._define_sizes()
        self._define_workspace()
        self._define_error_text()
        for parameter, data in self.parameters.initial.items():
            name = f"{self.name}_{parameter.name}_initial"
            self.unit.module.data(name, data.tobytes() or b"\0", is_exported=True)

    # --- the call

    def _define_call(self) -> None:
        program, parameters = self.program, self.parameters
        words = len(program.sizes) + len(program.inputs) + len(program.outputs)
        own = ["ptr %workspace", "i64 %workspace_bytes", "ptr %details"]
        signature = [
            *chain.from_iterable(map(_declared, parameters.all)),
            *own,
        ]
        f, emitter = self._function(f"signext i32 @{self.name}", signature, words)
        self._give_workspace(f)
        written = self._temporaries(emitter)
        made: dict[Parameter, str] = {}
        values = [
            *(f"i64 {emitter.values.value(size)}" for size in self._sizes()),
            *(f"ptr {self._input(f, given)}" for given in parameters.operands),
        ]
        for parameter in parameters.outputs:
            pointer = _argument(parameter)
            if parameter.role == "made":
                kind = f"[{1 + parameter.type.ndim} x i64]"
                pointer = made[parameter] = f.slot(kind, "made")
            elif parameter.role == "updated":
                pointer = written[parameter][0]
            values.append(f"ptr {pointer}")
        for k, value in enumerate(values, HEADER):
            _store(f, "%block", k, value)
        status = f.emit(f"call i64 @{symbol(program.name)}(ptr %block)")
        f.branch_if(f.emit(f"icmp ne i64 {status}, 0"), "stopped", "done")
        f.start("stopped")
        emitter.leave(status)
        f.start("done")
        for parameter, (pointer, size) in written.items():
            _copy(f, _argument(parameter), pointer, size)
        for parameter, slot in made.items():
            self._hand_over(f, parameter, slot)
        emitter.finish()
        self._report(f, emitter)
        self.unit.module.define(self.name, f.text)

    def _function(
        self, head: str, parameters: Sequence[str], words: int
    ) -> tuple[Function, StatementEmitter]:
        """Begin a function that has a block of words, and emit the preamble."""
        f = Function(self.unit.module, f"{head}({', '.join(parameters)})", "nounwind")
        memory = ProgramMemory(f)
        emitter = StatementEmitter(f, memory, self.unit)
        slot = f.slot(f"[{HEADER + words} x i64]", "words", 16)
        f.do(f"%block = getelementptr i64, ptr {slot}, i64 0")
        for k in range(HEADER):
            _store(f, "%block", k, "i64 0")
        emitter.name_trap_values()
        for parameter, place in self.preamble.parameters.items():
            if isinstance(place, Var):
                emitter.values.constants[place] = _argument(parameter)
            else:
                memory.place(place, _argument(parameter))
        emitter.straight(self.preamble.statements)
        return f, emitter

    def _sizes(self) -> list[Expr]:
        """Return the sizes that the program takes."""
        own = [self.preamble.values[s] for s in self.program.symbols]
        return [*own, *self.preamble.derived]

    def _give_workspace(self, f: Function) -> None:
        """Write to the block where the workspace begins, aligned, and its size."""
        address = f.emit("ptrtoint ptr %workspace to i64")
        missing = f.emit(f"sub i64 0, {address}")
        pad = f.emit(f"and i64 {missing}, {ALIGNMENT - 1}")
        start = f.emit(f"getelementptr i8, ptr %workspace, i64 {pad}")
        left = f.emit(f"sub i64 %workspace_bytes, {pad}")
        fits = f.emit(f"icmp sgt i64 {left}, 0")
        given = f.emit("icmp ne ptr %workspace, null")
        some = f.emit(f"and i1 {fits}, {given}")
        bytes_ = f.emit(f"select i1 {some}, i64 {left}, i64 0")
        _store(f, "%block", WORKSPACE, f"ptr {start}")
        _store(f, "%block", ROOM, f"i64 {bytes_}")

    def _temporaries(
        self, emitter: StatementEmitter
    ) -> dict[Parameter, tuple[str, str]]:
        """Allocate memory for what is written to parameters: its address, its size."""
        f, found = emitter.f, dict[Parameter, tuple[str, str]]()
        for parameter in self.parameters.outputs:
            if parameter.role == "updated":
                size = self._bytes(parameter)
                pointer = self.unit.heap.allocate(
                    f, emitter.values.value(rounded(size))
                )
                emitter.no_memory_if(f.emit(f"icmp eq ptr {pointer}, null"))
                found[parameter] = pointer, emitter.values.value(size)
        return found

    def _bytes(self, parameter: Parameter) -> Expr:
        return size_in_bytes(self.preamble.shapes[parameter], parameter.type.dtype)

    def _input(self, f: Function, given: Parameter | NDArray) -> str:
        """Return the address of an input of the program."""
        if not isinstance(given, Parameter):
            name = f"{self.name}.data.{self._data}"
            self._data += 1
            self.unit.module.data(name, given.tobytes() or b"\0")
            return f"@{name}"
        if given.role != "number":
            return _argument(given)
        slot = f.slot("double", "number")
        f.do(f"store double {_argument(given)}, ptr {slot}")
        return slot

    def _hand_over(self, f: Function, parameter: Parameter, slot: str) -> None:
        """Give the caller the address and the shape of an array that was made."""
        f.do(f"store ptr {f.emit(f'load ptr, ptr {slot}')}, ptr {_argument(parameter)}")
        for axis in range(parameter.type.ndim):
            at = f.emit(f"getelementptr i64, ptr {slot}, i64 {1 + axis}")
            extent = f.emit(f"load i64, ptr {at}")
            _store(f, f"{_argument(parameter)}.shape", axis, f"i64 {extent}")

    def _report(self, f: Function, emitter: StatementEmitter) -> None:
        """Emit the exit: the numbers that belong to an error, and the status."""
        f.start("exit")
        status = f.emit(f"load i64, ptr {emitter.status}")
        is_trap = f.emit(f"icmp sgt i64 {status}, 0")
        is_asked = f.emit("icmp ne ptr %details, null")
        f.branch_if(f.emit(f"and i1 {is_trap}, {is_asked}"), "report", "end")
        f.start("report")
        for k in range(2):
            _store(f, "%details", k, f"i64 {f.emit(f'load i64, ptr %trap{k}')}")
        f.branch("end")
        f.start("end")
        f.do(f"ret i32 {f.emit(f'trunc i64 {status} to i32')}")

    # --- the functions beside it

    def _define_sizes(self) -> None:
        """Define the function that tells the shapes of the results."""
        results = shaped(self.parameters)
        signature = [
            *chain.from_iterable(map(_declared, self.parameters.of_sizes)),
            *(f"ptr {_argument(p)}" for p in results),
        ]
        name = f"{self.name}_sizes"
        f, emitter = self._function(f"signext i32 @{name}", signature, 0)
        for parameter in results:
            for axis, extent in enumerate(self.preamble.shapes[parameter]):
                value = f"i64 {emitter.values.value(extent)}"
                _store(f, _argument(parameter), axis, value)
        emitter.finish()
        f.start("exit")
        status = f.emit(f"load i64, ptr {emitter.status}")
        f.do(f"ret i32 {f.emit(f'trunc i64 {status} to i32')}")
        self.unit.module.define(name, f.text)

    def _define_workspace(self) -> None:
        """Define the function that tells how large the workspace must be: 0, or what
        also leaves room to align it; less than 0 for sizes that are refused."""
        name = f"{self.name}_workspace"
        signature = chain.from_iterable(map(_declared, self.parameters.of_sizes))
        f, emitter = self._function(f"i64 @{name}", list(signature), 0)
        sizes = zip(self.program.sizes, self._sizes(), strict=True)
        total = replaced(self.room.total, dict(sizes))
        for parameter in self.parameters.outputs:
            if parameter.role == "updated":
                total = e.add(total, rounded(self._bytes(parameter)))
        value = emitter.values.value(total)
        aligned = f.emit(f"add i64 {value}, {ALIGNMENT - 1}")
        some = f.emit(f"icmp ne i64 {value}, 0")
        result = f.emit(f"select i1 {some}, i64 {aligned}, i64 0")
        slot = f.early_slot("i64", "bytes", "0")
        f.do(f"store i64 {result}, ptr {slot}")
        emitter.finish()
        f.start("exit")
        status = f.emit(f"load i64, ptr {emitter.status}")
        bytes_ = f.emit(f"load i64, ptr {slot}")
        f.do(f"ret i64 {f.emit(f'sub i64 {bytes_}, {status}')}")
        self.unit.module.define(name, f.text)

    def _define_error_text(self) -> None:
        """Define the function from a status to a text, by a table."""
        module, name = self.unit.module, f"{self.name}_error_text"
        texts = {0: "no error", -1: "no status of this function"}
        texts |= {s: x.text for s, x in self.preamble.failures.statuses().items()}
        for status, text in texts.items():
            module.data(f"{name}.{status}", text.encode() + b"\0")
        last = max(texts)
        rows = [f"ptr @{name}.{k if k in texts else -1}" for k in range(last + 1)]
        table = module.constant(
            f"{name}.all", f"[{last + 1} x ptr] [{', '.join(rows)}]"
        )
        f = Function(module, f"ptr @{name}(i32 signext %status)", "nounwind")
        f.branch_if(f.emit(f"icmp ule i32 %status, {last}"), "known", "other")
        f.start("known")
        row = f.emit(f"getelementptr ptr, ptr {table}, i32 %status")
        f.do(f"ret ptr {f.emit(f'load ptr, ptr {row}')}")
        f.start("other")
        is_memory = f.emit(f"icmp eq i32 %status, {OUT_OF_MEMORY}")
        memory, unknown = f"ptr @{name}.{OUT_OF_MEMORY}", f"ptr @{name}.-1"
        f.do(f"ret ptr {f.emit(f'select i1 {is_memory}, {memory}, {unknown}')}")
        module.define(name, f.text)


def shaped(parameters: Parameters) -> list[Parameter]:
    """The results whose shapes depend on the sizes of a call."""
    return [p for p in parameters.all if p.role == "output" and not p.type.is_static]


def _declared(parameter: Parameter) -> list[str]:
    """The declarations in LLVM IR of what a parameter is in C."""
    name = _argument(parameter)
    if parameter.role == "made":
        return [f"ptr {name}", f"ptr {name}.shape"]
    if not parameter.is_by_value:
        return [f"ptr {name}"]
    return [f"{register_type(parameter.type.dtype)} {name}"]


def _argument(parameter: Parameter) -> str:
    return f"%arg.{parameter.name}"


def _store(f: Function, base: str, word: int, value: str) -> None:
    """Store a value, "i64 3", in a word of an array of words."""
    at = f.emit(f"getelementptr i64, ptr {base}, i64 {word}")
    f.do(f"store {value}, ptr {at}")


def _copy(f: Function, target: str, source: str, size: str) -> None:
    f.module.declare("void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)")
    f.do(
        f"call void @llvm.memcpy.p0.p0.i64(ptr {target}, ptr {source}, i64 {size}, "
        "i1 false)"
    )
