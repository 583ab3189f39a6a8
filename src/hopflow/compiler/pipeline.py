"""The pipeline from a graph to native code: the one place with all stages in order."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from sys import getrefcount
from threading import RLock
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from hopflow.bind import Operand, Value
from hopflow.bind import Program as NodeProgram
from hopflow.compiler import files
from hopflow.compiler.bounds import with_bounds_checks
from hopflow.compiler.cache import KernelCache
from hopflow.compiler.callbacks import Callbacks
from hopflow.compiler.compared import difference, is_comparable
from hopflow.compiler.cpu.runtime import (
    Kernel,
    ObjectCode,
    Trapped,
    assembly,
    llvm_ir,
    object_code,
    optimised_llvm_ir,
)
from hopflow.compiler.cpu.target import CpuTarget, host
from hopflow.compiler.entry_sizes import CallSizes, call_sizes, failed_check
from hopflow.compiler.kernel_program.building import kernel_program
from hopflow.compiler.kernel_program.printer import format_kernels
from hopflow.compiler.kernel_program.program import KernelProgram
from hopflow.compiler.kernel_program.verifier import verify_kernels
from hopflow.compiler.layout import DENSE, Layouts, layout_of, strides_of
from hopflow.compiler.memory.plan import format_memory
from hopflow.compiler.owned import WORD, owned_array, result_words
from hopflow.compiler.passes import PASSES
from hopflow.compiler.passes.outline import called_functions, number
from hopflow.compiler.profiling import Measured, Table, with_counters
from hopflow.compiler.schedule.schedule import memory_plans, schedule
from hopflow.compiler.target import Target
from hopflow.compiler.traps import bounds_error, trap_error
from hopflow.config import config
from hopflow.errors import BoundsError, GraphError, KernelDisagreementError
from hopflow.graph.core import Arg, Constant, Graph, Node, Var, plain_symbol
from hopflow.graph.hashing import is_portable, structural_hash
from hopflow.graph.printer import format_graph
from hopflow.graph.regions import result_types
from hopflow.graph.rewriting import clone
from hopflow.graph.verifier import verify as verify_graph
from hopflow.logs import enabled, passing, span
from hopflow.loop_ir.printer import format_program
from hopflow.loop_ir.program import Program
from hopflow.loop_ir.verifier import verify as verify_program
from hopflow.loop_ir.walk import functions
from hopflow.progress import shown
from hopflow.recursion import deep_recursion
from hopflow.stats import counts
from hopflow.tensor import EagerTensor
from hopflow.tensor.aligned import aligned_empty, is_small_array, owns_memory

_Call: TypeAlias = Callable[..., Trapped | None]

_lock = RLock()
# The key is the hash of a graph, the target, the donated inputs, the layouts of the
# inputs, and the settings that affect the code.
_kernels = KernelCache()


def lower(
    graph: Graph,
    donated: Sequence[int] = (),
    layouts: Layouts = (),
    target: Target | None = None,
) -> tuple[Graph, Program]:
    """Run the passes over a copy of a graph, and schedule it.

    The nodes of the copy keep the numbers of the nodes that they come from, which the
    program reports when it stops. Each stage is verified if `config.verify`.

    Args:
        donated: Positions of inputs whose memory outputs may use; see `schedule`.
        layouts: The layouts of the inputs.
        target: The target of the program; None is the CPU of this machine.
    """
    graph = number(clone(graph))
    _run_passes(graph)
    kernels = kernel_program(graph)
    if config.verify:
        verify_kernels(kernels)
    target = _default_target() if target is None else target
    program = schedule(kernels, target, donated=donated, layouts=layouts)
    if config.check_bounds:
        program = with_bounds_checks(program)
    if config.verify:
        verify_program(program)
    return graph, program


def _default_target() -> CpuTarget:
    """Return the target of programs for which the caller names none."""
    return host()


def kernels_of(graph: Graph) -> KernelProgram:
    """Return the kernel program of a graph, after the passes over a copy of it."""
    graph = number(clone(graph))
    _run_passes(graph)
    return kernel_program(graph)


def _run_passes(graph: Graph) -> None:
    """Run the passes over a graph and the functions that it calls, in place."""
    for run in PASSES:
        with passing(run.__name__, graph.name, lambda: format_graph(graph)):
            run(graph)
        if config.verify:
            verify_graph(graph)
    for function in called_functions(graph):
        _run_passes(function)


class Executable:
    """A compiled graph, called with tensors for its inputs.

    All graphs of one structure share the native kernel; source lines and messages are
    those of this graph.
    """

    @deep_recursion()
    def __init__(
        self,
        graph: Graph,
        donated: Sequence[int] = (),
        target: CpuTarget | None = None,
    ) -> None:
        """Compile `graph`; its outputs may use the memory of `donated` inputs.

        Args:
            target: The target; None is the CPU of this machine.
        """
        self.graph = graph
        self.target = _default_target() if target is None else target
        self._donated = tuple(donated)
        self.kernel = self._compiled()
        self._call = self._bound(self.kernel)
        self._variants: dict[Layouts, _Variant] = {}  # for inputs that are not dense
        interface = self.kernel.interface
        inputs, outputs = interface.inputs, interface.outputs
        sources = {b: k for k, b in enumerate(inputs)}
        self._updated = {sources[b] for b in outputs if b in sources}
        allocated = interface.owned
        self._allocated = [
            (k, b.dtype.dtype) for k, b in enumerate(outputs) if b in allocated
        ]
        # A program that counts has one more output.
        results = list(zip(graph.out_types, outputs, strict=False))
        self._out_shapes = [
            result_words(t.ndim) if b in allocated else t.shape for t, b in results
        ]
        self._results = [
            (WORD if b in allocated else t.dtype.dtype, t.weak, sources.get(b))
            for t, b in results
        ]
        shapes = zip(self._out_shapes, self._results, strict=True)
        small = (is_small_array(shape, dtype) for shape, (dtype, *_) in shapes)
        self._empty = np.empty if all(small) else aligned_empty
        self._symbols = len(graph.symbols)

    def __call__(
        self, args: Sequence[EagerTensor], sizes: Sequence[int] | None = None
    ) -> list[EagerTensor]:
        """Run on concrete tensors, one for each input that is no symbol.

        Args:
            sizes: The values of the symbols; None takes them from the tensors.

        Raises:
            IndexingError, DivisionError, CheckError, LoopLimitError, LinalgError,
                ShapeError, ArgumentRangeError: The program has stopped; the error
                has the user's line.
            Exception: A callback has raised it.
            InvalidTensorError, DeviceError: The host may not use an argument.
            MemoryError: There is no memory for a result or for a temporary.
        """
        if self._updated:
            args = self._unshared(args)
        arrays, dense = [], True
        for arg in args:
            storage = arg._storage
            if storage is not None and storage.barred:
                arg.check_host()
            array = arg.array
            dense = dense and array.flags.c_contiguous
            arrays.append(array)
        if self._symbols or not dense:
            if sizes is None:
                sizes = [arrays[k].shape[axis] for k, axis in self._places]
            if dense:
                kernel, call, strides, find = self._dense
            else:
                kernel, call, strides, find = self._variant(arrays)
            derived, shapes = find(*sizes)
            before = self._copies(kernel, arrays) if config.verify else None
            outputs = self._allocate(shapes, arrays)
            try:
                trapped = call(*sizes, *strides, *derived, *arrays, *outputs)
            except BoundsError as error:
                # Inputs may have sizes with which a check of the graph fails.
                raise failed_check(self.graph, sizes) or error from None
        else:
            kernel = self.kernel
            before = self._copies(kernel, arrays) if config.verify else None
            outputs = self._allocate(self._out_shapes, arrays)
            trapped = self._call(*arrays, *outputs)
        if trapped is not None:
            raise self._error(kernel, trapped)
        for k, dtype in self._allocated:
            outputs[k] = owned_array(outputs[k], dtype, self.kernel.free)
        if before is not None:
            wrong = difference(self.graph, sizes or (), before, outputs)
            if wrong is not None:
                text = format_graph(self.graph)
                raise KernelDisagreementError(self.graph.name, wrong, text)
            kernel.compared = True
        return [
            EagerTensor(array, weak=weak)
            for array, (_, weak, _) in zip(outputs, self._results, strict=True)
        ]

    def _unshared(self, args: Sequence[EagerTensor]) -> list[EagerTensor]:
        """Return the arguments, with copies of those to overwrite that others share."""
        unshared = list(args)
        for k in self._updated:
            args[k].check_host()
            is_once = sum(arg is args[k] for arg in args) == 1
            if not (is_once and _is_alone(args[k])):
                unshared[k] = EagerTensor(args[k].array.copy())
        return unshared

    def _copies(self, kernel: Kernel, arrays: Sequence[Any]) -> list[Any] | None:
        """Return copies of the arguments of a kernel's first call, if `config.verify`.

        They are for the comparison of results, which may be in the arguments' memory.
        """
        if kernel.compared or not is_comparable(self.graph):
            return None
        return [np.array(a) for a in arrays]

    def _allocate(
        self, shapes: Sequence[Sequence[Any]], arrays: Sequence[Any]
    ) -> list[Any]:
        """Return memory for results of these shapes: new, or that of an input."""
        return [
            self._empty(shape, dtype) if source is None else arrays[source]
            for shape, (dtype, _, source) in zip(shapes, self._results, strict=True)
        ]

    def _compiled(self, layouts: Layouts = ()) -> Kernel:
        return _kernel(self.graph, self.target, self._donated, layouts)

    @cached_property
    def _dense(self) -> "_Variant":
        """The variant for inputs that are all dense."""
        return self._new_variant(self.kernel, self._call)

    def _new_variant(self, kernel: Kernel, call: _Call) -> "_Variant":
        sizes = call_sizes(self.graph, kernel.interface, self._out_shapes)
        return _Variant(kernel, call, [], sizes)

    @cached_property
    def _places(self) -> list[tuple[int, int]]:
        """For each symbol an input and the axis whose size it is."""
        return [_place_of(self.graph, v) for v in self.graph.symbols]

    def _bound(self, kernel: Kernel) -> _Call:
        """Return a kernel that calls the callbacks of this graph, if it has any."""
        callbacks = Callbacks(self.graph, kernel.interface)
        if not callbacks:
            return kernel.call
        call = kernel.calling(callbacks)
        return shown(call) if callbacks.tells else call

    def _variant(self, arrays: list[Any]) -> "_Variant":
        """Return the variant for the layouts of arrays, with their strides.

        It replaces arrays that must be dense by copies.
        """
        layouts = tuple(map(layout_of, arrays))
        for k, layout in enumerate(layouts):
            if layout == DENSE and not arrays[k].flags.c_contiguous:
                arrays[k] = np.ascontiguousarray(arrays[k])
        if all(layout == DENSE for layout in layouts):
            return self._dense
        if layouts not in self._variants:
            kernel = self._compiled(layouts)
            variant = self._new_variant(kernel, self._bound(kernel))
            self._variants[layouts] = variant
        strides = strides_of(arrays, layouts)
        return self._variants[layouts]._replace(strides=strides)

    def _error(self, kernel: Kernel, trapped: Trapped) -> Exception:
        number, *values = trapped
        site = kernel.interface.sites[number]
        if site.kind == "bounds":
            return bounds_error(site.detail, values)
        node = list(self.graph.walk())[site.node]
        return trap_error(site, node, values)

    @cached_property
    def profiled(self) -> "Profiled":
        """The same graph, compiled so that it counts and times its loops."""
        return Profiled(self)

    @property
    def kernels(self) -> str:
        return format_kernels(kernels_of(self.graph))

    @property
    def memory(self) -> str:
        plans = memory_plans(kernels_of(self.graph), self._donated)
        return "\n\n".join([format_memory(plan) for plan, _ in plans])

    @property
    def loop_ir(self) -> str:
        return format_program(self._lowered())

    @property
    def llvm_ir(self) -> str:
        return llvm_ir(self._lowered(), self.target)

    @property
    def optimised_llvm_ir(self) -> str:
        return optimised_llvm_ir(self._lowered(), self.target)

    @property
    def asm(self) -> str:
        return assembly(self._lowered(), self.target)

    def _lowered(self) -> Program:
        return lower(self.graph, self._donated, target=self.target)[1]


class Profiled(Executable):
    """A compiled graph that counts and times its own loops.

    It overwrites none of its arguments.
    """

    def __init__(self, executable: Executable) -> None:
        """Compile the graph of an executable, for the same target."""
        self._tables: dict[Kernel, Table] = {}
        self._measured: list[Measured] = []
        self._running = RLock()
        super().__init__(executable.graph, executable._donated, executable.target)

    def measured(
        self, args: Sequence[EagerTensor], sizes: Sequence[int]
    ) -> tuple[list[EagerTensor], list[Measured]]:
        """Run twice, and return the results and what the second run measured. In the
        first one memory is touched and threads are made."""
        with self._running:
            self(args, sizes)
            return self(args, sizes), self._measured

    def _unshared(self, args: Sequence[EagerTensor]) -> list[EagerTensor]:
        copied = list(args)
        for k in self._updated:
            args[k].check_host()
            copied[k] = EagerTensor(args[k].array.copy())
        return copied

    def _compiled(self, layouts: Layouts = ()) -> Kernel:
        tables: list[Table] = []

        def counting(program: Program) -> Program:
            program, table = with_counters(program)
            tables.append(table)
            return program

        native = _compile(self.graph, self.target, self._donated, layouts, counting)
        kernel = Kernel(native, self.target)
        [self._tables[kernel]] = tables
        return kernel

    def _bound(self, kernel: Kernel) -> _Call:
        call, table = super()._bound(kernel), self._tables[kernel]

        def counted(*args: Any) -> Trapped | None:
            counters = np.zeros(table.size, np.int64)
            trapped = call(*args, counters)
            self._measured = table.measured(counters)
            return trapped

        return counted


class _Variant(NamedTuple):
    """A kernel for inputs of certain layouts, and what a call of it needs.

    strides   the strides of the inputs that are not dense
    sizes     computes the derived sizes and the shapes of the results
    """

    kernel: Kernel
    call: _Call
    strides: list[int]
    sizes: CallSizes


def _is_alone(tensor: EagerTensor) -> bool:
    """Return whether only `tensor` uses its memory.

    A view, an array of another library or a buffer would refer to the array or to its
    base, or be its base.
    """
    if getrefcount(tensor.array) != _OWN_REFERENCES:
        return False
    array = tensor.array
    if array.base is not None and _base_references(array) != _BASE_REFERENCES:
        return False
    owner = array if array.base is None else array.base
    owns = isinstance(owner, np.ndarray) and owns_memory(owner)
    writable = array.flags.writeable and not tensor.storage.readonly
    return array.flags.c_contiguous and owns and writable


def _base_references(array: Any) -> int:
    base = array.base
    return getrefcount(base)


_PROBE: Final = EagerTensor(np.empty(0))
_OWN_REFERENCES: Final = getrefcount(_PROBE.array)
_BASE_REFERENCES: Final = _base_references(np.empty(1)[:0])


def _place_of(graph: Graph, symbol: Var) -> tuple[int, int]:
    """Return a tensor input and the axis whose size is a symbol."""
    tensors = [v for v in graph.inputs if v.node.section != "symbol"]
    for k, var in enumerate(tensors):
        for axis, n in enumerate(var.type.shape):
            if plain_symbol(n) is symbol.node.symbol:
                return k, axis
    raise GraphError(
        f"no input of graph `{graph.name}` has `{symbol.node.name}` as a size."
    )


def _kernel(
    graph: Graph, target: CpuTarget, donated: tuple[int, ...], layouts: Layouts
) -> Kernel:
    settings = config.check_bounds, config.guard_pages, config.require_in_place
    key = structural_hash(graph), target, donated, layouts, settings
    with _lock:
        cached = _kernels.find(key)
        if cached is not None:
            counts.cache_hits += 1
            return cached
        # A program from a file would not show its stages to verifiers and logs.
        shows_stages = config.verify or enabled("passes")
        is_stored = not shows_stages and is_portable(graph)
        stored = files.find(f"program {key}") if is_stored else None
        if stored is not None:
            counts.file_hits += 1
            native = ObjectCode.from_bytes(stored)
        else:
            native = _compile(graph, target, donated, layouts)
            if is_stored:
                files.store(f"program {key}", native.to_bytes())
        kernel = Kernel(native, target)
        _kernels.add(key, kernel)
        return kernel


def _compile(
    graph: Graph,
    target: CpuTarget,
    donated: tuple[int, ...],
    layouts: Layouts,
    edit: Callable[[Program], Program] | None = None,
) -> ObjectCode:
    """Compile a graph.

    Args:
        edit: A last pass over the finished program.
    """
    counts.compiles += 1
    with _no_collection():
        with span("lower", graph=graph.name):
            _, program = lower(graph, donated, layouts, target)
            if edit is not None:
                program = edit(program)
                if config.verify:
                    verify_program(program)
        counts.functions += len(functions(program))
        with span("compile", graph=graph.name):
            return object_code(program, target)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable the garbage collector in this context.

    A program under construction is millions of objects without cycles, which live until
    it is compiled. To scan them again and again takes a third of the time.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


def clear_cache() -> None:
    """Remove all compiled programs from the cache; those in use stay alive."""
    with _lock:
        _kernels.clear()


def program(op: Any, args: Sequence[Operand], params: dict[str, Any]) -> NodeProgram:
    """Compile one node: the program of eager calls of operators.

    Args:
        args: The program takes args like these: tensors of the same types, and the same
            constants.
    """
    graph = Graph(op.name)
    inputs: list[Arg] = []
    places: list[int] = []  # of the args that the program takes
    operands: Any = tuple(args)
    roles = op.signature(Node("call_function", op, operands, params)).args
    for k, (arg, role) in enumerate(zip(args, roles, strict=True)):
        if role == "symbol" and isinstance(arg, Constant):
            inputs.append(arg)  # a constant, as the shapes of the tensors are
            continue
        if isinstance(arg, Value) and not isinstance(arg, EagerTensor):
            raise TypeError(f"`{op.name}` is run on {type(arg).__name__}, no tensor")
        places.append(k)
        inputs.append(graph.add_input(arg.type, f"x{k}"))
    node = graph.call(op, inputs, params, result_types(op, inputs, params))
    graph.outputs = node.results
    executable = Executable(graph)

    def run(args: Sequence[Operand]) -> tuple[Value, ...]:
        return tuple(executable([_tensor(args[k]) for k in places]))

    return run


def _tensor(arg: Operand) -> EagerTensor:
    if isinstance(arg, Constant):
        return EagerTensor(np.asarray(arg.value, arg.type.dtype.dtype))
    assert isinstance(arg, EagerTensor)
    return arg
