"""Builders of LLVM IR as text: a module, and its functions one at a time.

Parsing text takes LLVM less than half of the time of its builder API, and text can
spell every flag and attribute. Registers are numbered in the order of their text, as
LLVM requires of unnamed values; whatever is placed out of that order (stack slots, code
hoisted before a loop) has a name instead.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from hopflow.loop_ir.intervals import Interval

OPAQUE = "nounwind memory(argmem: readwrite, inaccessiblemem: readwrite)"
"""Attributes of an external function that accesses its arguments, and no other memory
of the program."""
RARE = ", !prof !1"
"""Metadata of a branch whose first side is rare."""
INLINED = 16
"""A function that is called from more places is not inlined: each copy has some 40
instructions, and to select and to allocate them takes LLVM more than linear time. A
call takes less than a tenth of the time of the function."""


SMALLEST_PART: Final = 60
"""Lines of a module that is compiled in a thread of its own, at least: LLVM takes some
milliseconds for any function."""
_SYMBOL: Final = re.compile(r"@([\w.]+)")


def symbol(name: str) -> str:
    """Return the linker symbol of a program, or of a function, of this name."""
    return f"hf_kernel_{plain(name)}"


def plain(name: str) -> str:
    """Return `name` with only characters that LLVM and linkers accept unquoted."""
    return re.sub(r"[^0-9A-Za-z_]", "_", name)


VECTOR_BYTES: Final = 512
"""The size of the widest vector of a loop: 64 lanes of 64 bits."""


class Module:
    """The text of one module: declarations, data, functions, attributes and metadata.

    symbols       the names whose addresses the linker must provide
    has_extrema   whether the target has instructions for the minimum and the maximum of
                  floats, where NaN is the result if it is an operand, and -0 < 0
    has_fma       whether it has instructions for fused multiply-add
    """

    def __init__(self, *, has_extrema: bool = False, has_fma: bool = False) -> None:
        self.has_extrema, self.has_fma = has_extrema, has_fma
        self.symbols: set[str] = set()  # the linker must have their addresses
        self._globals: dict[str, str] = {}
        self._functions: dict[str, str] = {}
        self._inlined: dict[str, int] = {}  # by function, the number of its attributes
        self._notes = ["!{}", '!{!"branch_weights", i32 1, i32 100000}']

    def declare(self, declaration: str) -> None:
        """Declare an intrinsic, for example "double @llvm.fabs.f64(double)"."""
        if declaration not in self._globals:
            self._globals[declaration] = f"declare {declaration}"

    def external(self, declaration: str, attributes: str = "") -> None:
        """Declare a function that the linker finds, for example "ptr @malloc(i64)"."""
        self.symbols.add(
            declaration[declaration.index("@") + 1 : declaration.index("(")]
        )
        self._globals[declaration] = f"declare {declaration} {attributes}"

    def zeros(self) -> str:
        """Return the address of as many zero bytes as the widest vector has."""
        content = f"[{VECTOR_BYTES} x i8] zeroinitializer"
        self._globals["zeros"] = f"@hf.zeros = internal constant {content}, align 64"
        return "@hf.zeros"

    def external_data(self, name: str) -> None:
        """Declare data that the linker resolves."""
        self.symbols.add(name)
        self._globals[name] = f"@{name} = external global i8"

    def data(self, name: str, content: bytes, *, is_exported: bool = False) -> None:
        """Define read-only data that is aligned for any vector.

        Args:
            is_exported: Whether other modules see its name.
        """
        escaped = content.hex("\\")
        kind = "" if is_exported else "internal "
        self._globals[name] = (
            f'@{name} = {kind}constant [{len(content)} x i8] c"\\{escaped}", align 64'
        )

    def constant(self, name: str, content: str) -> str:
        """Define a constant, for example "[1 x ptr] [ptr @x]"; return its address."""
        self._globals[name] = f"@{name} = internal constant {content}"
        return f"@{name}"

    def table(self, words: Sequence[int]) -> str:
        """Define read-only words, and return a new name for them."""
        number = 0
        while f"hf.table{number}" in self._globals:
            number += 1
        name, content = f"hf.table{number}", ", ".join([f"i64 {w}" for w in words])
        self._globals[name] = (
            f"@{name} = internal constant [{len(words)} x i64] [{content}]"
        )
        return name

    def fresh(self, name: str) -> str:
        """Reserve and return a function name that is not in use."""
        number = 0
        while self.has_function(f"{name}{number}"):
            number += 1
        self.define(f"{name}{number}", "")
        return f"{name}{number}"

    def has_function(self, name: str) -> bool:
        return name in self._functions

    def define(self, name: str, text: str) -> None:
        """Add the text of a function, or "" to reserve its name."""
        self._functions[name] = text

    def provide(self, name: str) -> None:
        """Take a function that is defined here for one that `external` has declared,
        and hide it from other modules."""
        self.symbols.discard(name)
        text = self._functions[name].removeprefix("define ")
        self._functions[name] = f"define internal {text}"
        for declaration in [d for d in self._globals if f" @{name}(" in d]:
            del self._globals[declaration]

    @property
    def declarations(self) -> list[str]:
        """The declarations, for example "double @llvm.fabs.f64(double)"."""
        return [d for d in self._globals if "(" in d]

    def replace(self, declaration: str, own: str, text: str) -> None:
        """Call the function `own`, of this text, in place of one that is declared."""
        del self._globals[declaration]
        name = declaration[declaration.index("@") : declaration.index("(") + 1]
        for function, body in self._functions.items():
            self._functions[function] = body.replace(name, f"@{own}(")
        self.define(own, text)

    def redeclare(self, declaration: str, other: str) -> None:
        """Put another declaration, which may be there already, in place of one."""
        self._globals[other] = self._globals.pop(declaration).replace(
            declaration, other
        )

    def inlined(self, name: str) -> str:
        """Return the attributes of a function that is inlined if few places call it.

        The number of calls is known once the module is complete.
        """
        return f"#{self._inlined.setdefault(name, len(self._inlined))}"

    def note(self, *members: str, distinct: bool = False) -> str:
        """Return a metadata node; a distinct one is its own first member."""
        name = f"!{len(self._notes)}"
        text = ", ".join((name, *members) if distinct else members)
        self._notes.append(f"{'distinct ' * distinct}!{{{text}}}")
        return name

    @property
    def text(self) -> str:
        return self._joined((*self._globals.values(), *self._functions.values()))

    def parts(self, most: int) -> list[str]:
        """Return up to `most` modules that make the same program if they are linked.

        Each function is in one of them, and the others declare it. Inlined functions
        and constants are in each that refers to them.
        """
        inlined = {n for n in self._inlined if self._is_inlined(n)}
        separate = [n for n in self._functions if n not in inlined]
        for count in range(min(most, len(separate)), 1, -1):
            groups = self._balanced(separate, count)
            if min(map(self._length, groups)) >= SMALLEST_PART:
                return [self._part(group, inlined) for group in groups]
        return [self.text]

    def _balanced(self, names: Sequence[str], count: int) -> list[list[str]]:
        """Divide functions into groups of about the same length."""
        groups: list[list[str]] = [[] for _ in range(count)]
        for name in sorted(names, key=lambda n: self._length([n]), reverse=True):
            min(groups, key=self._length).append(name)
        return groups

    def _length(self, names: Sequence[str]) -> int:
        return sum(self._functions[name].count("\n") for name in names)

    def _part(self, names: Sequence[str], inlined: set[str]) -> str:
        """Return a module with some of the functions, and what they refer to."""
        others = {_SYMBOL.findall(text)[0]: text for text in self._globals.values()}
        texts: dict[str, str] = {}
        pending = [*names]
        while pending:
            name = pending.pop()
            if name in texts:
                continue
            text = self._functions.get(name) or others[name]
            if name in names:
                text = text.replace("define internal ", "define hidden ", 1)
            elif name not in others and name not in inlined:
                head, _, _ = text.partition(" {\n")
                text = head.replace("define internal ", "declare hidden ", 1)
            texts[name] = text
            pending += _SYMBOL.findall(text)
        order = (*others, *self._functions)
        return self._joined(texts[name] for name in order if name in texts)

    def _joined(self, texts: Iterable[str]) -> str:
        """Return the text of a module, with all attributes and metadata."""
        attributes = []
        for name, number in self._inlined.items():
            inline = "alwaysinline" if self._is_inlined(name) else "noinline"
            attributes.append(f"attributes #{number} = {{ {inline} nounwind }}")
        notes = [f"!{k} = {note}" for k, note in enumerate(self._notes)]
        return "\n".join((*texts, *attributes, *notes, ""))

    def _is_inlined(self, name: str) -> bool:
        calls = sum(text.count(f" @{name}(") for text in self._functions.values())
        return calls <= INLINED + 1  # the definition has the name once more


class Function:
    """A function under construction: instructions are appended to the current block."""

    def __init__(self, module: Module, signature: str, attributes: str) -> None:
        """Start the entry block of a function, for example "i64 @name(ptr %block)"."""
        self.module = module
        self.block = "entry"  # the label of the current block
        self._signature, self._attributes = signature, attributes
        self._slots: list[str] = []
        self._lines: list[str] = []
        self.work = 0  # operations inside called functions, beside the instructions
        self._count = 0
        self._names = 0
        self._prefix = "%"
        self._preheaders: list[list[str]] = []  # of the open loops, outermost first
        self._depths: dict[str, int] = {}
        self.bounds: dict[str, int] = {}  # exclusive, of i64 that are never negative
        self.intervals: dict[str, Interval] = {}  # of floats that have bounds

    def emit(self, instruction: str) -> str:
        """Append an instruction with a result; return its register."""
        register = f"{self._prefix}{self._count}"
        self._count += 1
        self._lines.append(f"  {register} = {instruction}")
        if self._preheaders:
            self._depths[register] = len(self._preheaders)
        return register

    def do(self, instruction: str) -> None:
        """Append an instruction without a result."""
        self._lines.append(f"  {instruction}")

    def name(self, hint: str) -> str:
        """Return a new name for a block, slot or register."""
        self._names += 1
        return f"{hint}.{self._names}"

    def start(self, label: str) -> None:
        """Begin the block `label`; a branch must have ended the block before."""
        self._lines.append(f"{label}:")
        self.block = label

    def branch(self, label: str) -> None:
        self._lines.append(f"  br label %{label}")

    def branch_if(self, test: str, then: str, otherwise: str, hint: str = "") -> None:
        """Append a conditional branch; `hint` is metadata on which side is rare."""
        self._lines.append(f"  br i1 {test}, label %{then}, label %{otherwise}{hint}")

    def slot(self, llvm_type: str, hint: str, align: int = 0) -> str:
        """Add a stack slot; LLVM turns those of scalars and vectors into registers."""
        slot = f"%{self.name(hint)}"
        aligned = f", align {align}" if align else ""
        self._slots.append(f"  {slot} = alloca {llvm_type}{aligned}")
        return slot

    def early_slot(self, llvm_type: str, hint: str, value: str) -> str:
        """Add a stack slot that holds the constant `value` from the entry on."""
        slot = self.slot(llvm_type, hint)
        self._slots.append(f"  store {llvm_type} {value}, ptr {slot}")
        return slot

    @contextmanager
    def hoisted(self, lines: list[str]) -> Iterator[None]:
        """Append to `lines` in this context; the caller puts them before all loops."""
        with self._appended_to(lines, 0):
            yield

    @contextmanager
    def _appended_to(self, lines: list[str], depth: int) -> Iterator[None]:
        outer = self._lines, self._prefix, self._preheaders
        self._lines, self._prefix = lines, "%u"
        self._preheaders = self._preheaders[:depth]
        yield
        self._lines, self._prefix, self._preheaders = outer

    @contextmanager
    def before(self, place: int) -> Iterator[None]:
        """Put what is appended in this context where the line `place` is, in place of
        it: that of a branch to the block behind it."""
        lines: list[str] = []
        block = self.block
        with self._appended_to(lines, len(self._preheaders)):
            yield
        self.block = block
        self._lines[place : place + 1] = lines

    # --- loops

    @property
    def depth(self) -> int:
        """The number of open loops."""
        return len(self._preheaders)

    def depth_of(self, value: str) -> int:
        """Return the loop depth of a register: 0 for arguments and constants."""
        return self._depths.get(value, 0)

    def define(self, register: str) -> None:
        """Record that a line of `do` defines a register at the current loop depth."""
        self._depths[register] = len(self._preheaders)

    @contextmanager
    def loop(self) -> Iterator[None]:
        """Append the blocks of a loop in this context, after the loop's preheader."""
        before, self._lines = self._lines, []
        preheader: list[str] = []
        self._preheaders.append(preheader)
        yield
        self._preheaders.pop()
        before += preheader
        before += self._lines
        self._lines = before

    @contextmanager
    def preheader(self, depth: int) -> Iterator[list[str]]:
        """Append in this context to the preheader of the open loop at `depth`."""
        lines = self._preheaders[depth]
        with self._appended_to(lines, depth):
            yield lines

    def preheader_size(self, depth: int) -> int:
        """Return the number of lines in the preheader of the open loop at `depth`."""
        return len(self._preheaders[depth])

    def insert(self, lines: list[str]) -> None:
        """Append complete lines."""
        self._lines += lines

    @property
    def size(self) -> int:
        """The number of lines so far."""
        return len(self._lines)

    def take(self) -> list[str]:
        """Remove and return all lines, for the caller to insert elsewhere."""
        lines, self._lines = self._lines, []
        return lines

    @property
    def text(self) -> str:
        head = f"define {self._signature} {self._attributes} {{\nentry:"
        return "\n".join((head, *self._slots, *self._lines, "}"))
