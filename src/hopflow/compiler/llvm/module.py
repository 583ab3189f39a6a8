"""Building LLVM IR as text: a module, and one function of it at a time.

Text that LLVM parses costs less than half of what its builder API would, and it can
spell every flag and attribute. Registers are numbered in the order of their text, which
is what LLVM asks of unnamed values; whatever is placed out of that order (stack slots,
code hoisted before a loop) has a name instead.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

OPAQUE = "nounwind memory(argmem: readwrite, inaccessiblemem: readwrite)"
"""Attributes of a function elsewhere that touches what it is given, and no other memory
of the program's."""
RARE = ", !prof !1"
"""Metadata of a branch whose first side is rare."""
INLINED = 64
"""A function that is called from more places is not inlined: each is some 40
instructions, and what registers do costs LLVM time that is quadratic in them."""


def symbol(name: str) -> str:
    """What a program, or a function, of this name is called."""
    return f"hf_kernel_{plain(name)}"


def plain(name: str) -> str:
    """`name` as LLVM and linkers take it without quotes."""
    return re.sub(r"[^0-9A-Za-z_]", "_", name)


VECTOR_BYTES: Final = 512
"""Of 64 lanes, the most that a vector loop has, of 64 bits."""


class Module:
    """The text of one module: declarations, data and functions, each by its name; and
    metadata, by numbers."""

    def __init__(self) -> None:
        self.symbols: set[str] = set()  # what the linker must be given addresses of
        self._globals: dict[str, str] = {}
        self._functions: dict[str, str] = {}
        self._inlined: dict[str, int] = {}  # by name: where their attributes stand
        self._notes = ["!{}", '!{!"branch_weights", i32 1, i32 100000}']

    def declare(self, declaration: str) -> None:
        """Declare an intrinsic, as "double @llvm.fabs.f64(double)"."""
        if declaration not in self._globals:
            self._globals[declaration] = f"declare {declaration}"

    def external(self, declaration: str, attributes: str = "") -> None:
        """Declare a function that the linker finds, as "ptr @malloc(i64)"."""
        self.symbols.add(
            declaration[declaration.index("@") + 1 : declaration.index("(")]
        )
        self._globals[declaration] = f"declare {declaration} {attributes}"

    def zeros(self) -> str:
        """The address of as many zeros as any vector has bytes."""
        content = f"[{VECTOR_BYTES} x i8] zeroinitializer"
        self._globals["zeros"] = f"@hf.zeros = internal constant {content}, align 64"
        return "@hf.zeros"

    def external_data(self, name: str) -> None:
        """Declare data that the linker finds."""
        self.symbols.add(name)
        self._globals[name] = f"@{name} = external global i8"

    def data(self, name: str, content: bytes) -> None:
        """Define read-only data, aligned for any vector."""
        escaped = "".join(f"\\{byte:02X}" for byte in content)
        self._globals[name] = (
            f'@{name} = internal constant [{len(content)} x i8] c"{escaped}", align 64'
        )

    def table(self, words: Sequence[int]) -> str:
        """Define read-only words; return a name for them that no other data has."""
        number = 0
        while f"table{number}" in self._globals:
            number += 1
        name, content = f"table{number}", ", ".join([f"i64 {w}" for w in words])
        self._globals[name] = (
            f"@{name} = internal constant [{len(words)} x i64] [{content}]"
        )
        return name

    def fresh(self, name: str) -> str:
        """A name for a function that no other has; it is reserved."""
        number = 0
        while self.has_function(f"{name}{number}"):
            number += 1
        self.define(f"{name}{number}", "")
        return f"{name}{number}"

    def has_function(self, name: str) -> bool:
        return name in self._functions

    def define(self, name: str, text: str) -> None:
        """Add the text of a function (or reserve its name, with no text yet)."""
        self._functions[name] = text

    def inlined(self, name: str) -> str:
        """The attributes of a function that is to be inlined, unless it is called from
        too many places: that is known at the end."""
        return f"#{self._inlined.setdefault(name, len(self._inlined))}"

    def note(self, *members: str, distinct: bool = False) -> str:
        """Metadata of other metadata; what is distinct is its own first member."""
        name = f"!{len(self._notes)}"
        text = ", ".join((name, *members) if distinct else members)
        self._notes.append(f"{'distinct ' * distinct}!{{{text}}}")
        return name

    @property
    def text(self) -> str:
        functions = "\n".join(self._functions.values())
        attributes = []
        for name, number in self._inlined.items():
            few = functions.count(f" @{name}(") <= INLINED + 1  # with the definition
            inline = "alwaysinline" if few else "noinline"
            attributes.append(f"attributes #{number} = {{ {inline} nounwind }}")
        notes = [f"!{k} = {note}" for k, note in enumerate(self._notes)]
        parts = (*self._globals.values(), functions, *attributes, *notes, "")
        return "\n".join(parts)


class Function:
    """A function under construction: instructions are appended to the open block."""

    def __init__(self, module: Module, signature: str, attributes: str) -> None:
        """Start "i64 @name(ptr %block)" at its entry block."""
        self.module = module
        self.block = "entry"  # the label of the open block
        self._signature, self._attributes = signature, attributes
        self._slots: list[str] = []
        self._lines: list[str] = []
        self.work = 0  # beside the instructions: what they stand for
        self._count = 0
        self._names = 0
        self._prefix = "%"
        self._preheaders: list[list[str]] = []  # of the open loops, outermost first
        self._depths: dict[str, int] = {}
        self.bounds: dict[str, int] = {}  # of i64 registers that are never negative

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
        """A name for a block, slot or register that no other has."""
        self._names += 1
        return f"{hint}.{self._names}"

    def start(self, label: str) -> None:
        """Open the block `label`; the one before must have been ended by a branch."""
        self._lines.append(f"{label}:")
        self.block = label

    def branch(self, label: str) -> None:
        self._lines.append(f"  br label %{label}")

    def branch_if(self, test: str, then: str, otherwise: str, hint: str = "") -> None:
        """`hint` is metadata: which side is rare."""
        self._lines.append(f"  br i1 {test}, label %{then}, label %{otherwise}{hint}")

    def slot(self, llvm_type: str, hint: str, align: int = 0) -> str:
        """A stack slot; LLVM turns those of scalars and vectors into registers."""
        slot = f"%{self.name(hint)}"
        aligned = f", align {align}" if align else ""
        self._slots.append(f"  {slot} = alloca {llvm_type}{aligned}")
        return slot

    def early_slot(self, llvm_type: str, hint: str, value: str) -> str:
        """A stack slot that holds the constant `value` from the beginning."""
        slot = self.slot(llvm_type, hint)
        self._slots.append(f"  store {llvm_type} {value}, ptr {slot}")
        return slot

    @contextmanager
    def hoisted(self, lines: list[str]) -> Iterator[None]:
        """Append to `lines` meanwhile: the caller puts them before all loops."""
        with self._appended_to(lines, 0):
            yield

    @contextmanager
    def _appended_to(self, lines: list[str], depth: int) -> Iterator[None]:
        kept = self._lines, self._prefix, self._preheaders
        self._lines, self._prefix = lines, "%u"
        self._preheaders = self._preheaders[:depth]
        yield
        self._lines, self._prefix, self._preheaders = kept

    # --- loops

    @property
    def depth(self) -> int:
        """How many loops are open."""
        return len(self._preheaders)

    def depth_of(self, value: str) -> int:
        """In how many loops a register is defined; 0 for a constant or an argument."""
        return self._depths.get(value, 0)

    def define(self, register: str) -> None:
        """Say that a register is defined in the open loops, by a line of `do`."""
        self._depths[register] = len(self._preheaders)

    @contextmanager
    def loop(self) -> Iterator[None]:
        """Append the blocks of a loop meanwhile; its preheader comes before them."""
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
        """Append to the preheader of the open loop around which there are `depth`."""
        lines = self._preheaders[depth]
        with self._appended_to(lines, depth):
            yield lines

    def preheader_size(self, depth: int) -> int:
        """How many lines the preheader of that loop has so far."""
        return len(self._preheaders[depth])

    def insert(self, lines: list[str]) -> None:
        """Append finished lines."""
        self._lines += lines

    @property
    def size(self) -> int:
        """Lines so far."""
        return len(self._lines)

    def take(self) -> list[str]:
        """Remove the lines so far, for the caller to put back."""
        lines, self._lines = self._lines, []
        return lines

    @property
    def text(self) -> str:
        head = f"define {self._signature} {self._attributes} {{\nentry:"
        return "\n".join((head, *self._slots, *self._lines, "}"))
