"""Programs as text, which is stable, for people and for tests.

An expression is written infix with as few parentheses as possible. A long part that
occurs more than once in a statement is named in a line `%0 = ...` before it, and so are
parts that would make a line too long: the text never grows faster than the program.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from hopflow import dtypes
from hopflow.dtypes import DType
from hopflow.loop_ir import walk
from hopflow.loop_ir.expr import COMPARE, Buffer, Expr, add, condition_of
from hopflow.loop_ir.program import (
    Accumulate,
    Allocate,
    Assign,
    Barrier,
    Call,
    Copy,
    Declare,
    For,
    HostCall,
    If,
    Invoke,
    Let,
    Program,
    Ref,
    Stmt,
    Store,
    Swap,
    Tick,
    Trap,
    While,
)

LONG_SHARED: Final = 80
"""Parts of at least so many characters that occur twice in a statement are named."""
LONG: Final = 400
"""Parts of an expression of at least so many characters are named."""
SHOWN: Final = 8
"""A constant buffer of at most so many elements is printed; of others, a checksum."""


# --- expressions ----------------------------------------------------------------------


# Python's precedences, the lowest first.
_OR, _AND, _NOT, _COMPARISON, _BIT_OR, _BIT_XOR, _BIT_AND, _SHIFT, _SUM, _PRODUCT = (
    range(10)
)
_SIGN, _ATOM = 10, 11
_INFIX: Final[dict[str, tuple[str, int]]] = {
    "or": ("|", _BIT_OR),
    "xor": ("^", _BIT_XOR),
    "and": ("&", _BIT_AND),
    "shl": ("<<", _SHIFT),
    "ashr": (">>", _SHIFT),
    "add": ("+", _SUM),
    "sub": ("-", _SUM),
    "mul": ("*", _PRODUCT),
    "div": ("/", _PRODUCT),
    "rem": ("%", _PRODUCT),
    "eq": ("==", _COMPARISON),
    "ne": ("!=", _COMPARISON),
    "lt": ("<", _COMPARISON),
    "le": ("<=", _COMPARISON),
    "gt": (">", _COMPARISON),
    "ge": (">=", _COMPARISON),
}
_LOGICAL: Final = {"or": ("or", _OR), "and": ("and", _AND)}
# Operations whose operands have the dtype of the result.
_KEEPS_DTYPE: Final = frozenset(
    "neg abs add sub mul div rem min max and or xor shl lshr ashr".split()
)
_PLAIN: Final = (dtypes.bool_, dtypes.int64, dtypes.float32)
"""The dtypes whose constants are always printed without a dtype."""

_Text = tuple[str, int]  # a text and its precedence


class Namer:
    """Formats the expressions of one statement; `lines` name parts of them."""

    def __init__(self, roots: Sequence[Expr]) -> None:
        self.lines: list[str] = []
        self._texts: dict[tuple[Expr, bool], _Text] = {}
        order = walk.nodes(*roots)
        self._uses = Counter(a for node in order for a in node.args)
        self._uses.update(roots)

    def text(self, root: Expr, typed: bool = True) -> str:
        """Return the text of `root`; `typed` if the context implies its dtype."""
        return self._visit(root, typed)[0]

    def _visit(self, root: Expr, typed: bool) -> _Text:
        texts = self._texts
        pending = [(root, typed)]
        while pending:
            key = pending[-1]
            below = [k for k in self._operands(*key) if k not in texts]
            if below:
                pending += reversed(below)
                continue
            pending.pop()
            if key not in texts:
                texts[key] = self._named(
                    key[0], self._write(*key), key == (root, typed)
                )
        return texts[(root, typed)]

    def _operands(self, node: Expr, typed: bool) -> list[tuple[Expr, bool]]:
        """Return the operands, each with whether the context implies its dtype."""
        args = node.args
        if node.op in ("load", "element"):
            return [(a, True) for a in args]
        if node.op == "select" and len(args) == 3:
            return [(args[0], True), *_same_dtype(args[1:], typed)]
        if node.op in COMPARE:
            return _same_dtype(args, False)
        if node.op in ("cast", "bitcast", "isnan"):
            return [(a, False) for a in args]
        return _same_dtype(args, typed)

    def _named(self, node: Expr, text: _Text, is_root: bool) -> _Text:
        long = LONG_SHARED if self._uses[node] > 1 else LONG
        if len(text[0]) < long or is_root or not node.args:
            return text
        name = f"%{len(self.lines)}"
        self.lines.append(f"{name}: {node.dtype} = {text[0]}")
        for typed in (False, True):
            self._texts[(node, typed)] = (name, _ATOM)
        return name, _ATOM

    def _write(self, node: Expr, typed: bool) -> _Text:
        op = node.op
        if op == "const":
            return _constant(node.attr, node.dtype, typed)
        if op == "var":
            return node.attr.name, _ATOM
        if op == "size":
            size = str(node.attr)
            return size if size.isidentifier() else f"({size})", _ATOM
        texts = [self._texts[key] for key in self._operands(node, typed)]
        inner = ", ".join(text for text, _ in texts)
        if op in ("load", "element") and condition_of(node) is not None:
            at = ", ".join(text for text, _ in texts[:-1])
            zero = " else 0" if op == "load" else ""
            return f"({node.attr.name}[{at}] if {texts[-1][0]}{zero})", _ATOM
        if op in ("load", "element"):
            return f"{node.attr.name}[{inner}]", _ATOM
        if op in ("cast", "bitcast"):
            name = f"{node.dtype}" if op == "cast" else f"bits_{node.dtype}"
            return f"{name}({inner})", _ATOM
        is_bool = node.dtype.kind == "b"
        if len(texts) == 1 and op in ("neg", "not"):
            sign, binds = ("not ", _NOT) if is_bool else ("-", _SIGN)
            sign = "~" if op == "not" and not is_bool else sign
            return sign + _parenthesised(texts[0], binds), binds
        infix = _LOGICAL.get(op) if is_bool else None
        infix = infix or _INFIX.get(op)
        if infix and len(texts) == 2:
            symbol, binds = infix
            # All operators except comparisons associate to the left.
            left = _parenthesised(texts[0], binds + (op in COMPARE))
            return f"{left} {symbol} {_parenthesised(texts[1], binds + 1)}", binds
        return f"{op}({inner})", _ATOM


def _same_dtype(args: Sequence[Expr], typed: bool) -> list[tuple[Expr, bool]]:
    """Return operands of one dtype, which any that is no constant implies."""
    implied = typed or any(not a.is_const for a in args)
    return [(a, implied if a.is_const else typed) for a in args]


def _parenthesised(text: _Text, binds: int) -> str:
    return text[0] if text[1] >= binds else f"({text[0]})"


def _constant(value: Any, dtype: DType, typed: bool) -> _Text:
    if dtype.kind == "f":
        text = str(float(value))
        if dtype.bits < 64 and np.isfinite(value):
            narrow = np.float16 if dtype is dtypes.float16 else np.float32
            text = str(narrow(value))
    else:
        text = str(value)
    if not typed and dtype not in _PLAIN:
        return f"{text}:{dtype}", _ATOM
    return text, _SIGN if text.startswith("-") else _ATOM


def format_expr(expr: Expr) -> str:
    """Return the text of `expr`, after the lines that name its parts."""
    namer = Namer([expr])
    text = namer.text(expr)
    return "\n".join([*namer.lines, text])


# --- statements -----------------------------------------------------------------------


_ACCUMULATE: Final = {
    "add": "+=",
    "mul": "*=",
    "min": "min=",
    "max": "max=",
    "and": "&=",
    "or": "|=",
}


def _simple(s: Stmt, text: Callable[..., str]) -> str:
    """Return the line of a statement without bodies; `text` formats its expressions."""
    match s:
        case Let() | Declare():
            keyword = "let" if isinstance(s, Let) else "var"
            return f"{keyword} {s.var.name}: {s.var.dtype} = {text(s.value)}"
        case Assign():
            return f"{s.var.name} = {text(s.value)}"
        case Accumulate():
            symbol = _ACCUMULATE.get(s.combine, f"{s.combine}=")
            return f"{s.var.name} {symbol} {text(s.value)}"
        case Store():
            return f"{_place(s.buffer, s.indices, text)} = {text(s.value)}"
        case Copy():
            return f"copy {s.target.name} <- {s.source.name}"
        case Swap():
            return f"swap {s.a.name}, {s.b.name}"
        case Call():
            args = ", ".join(
                _ref(a, text) if isinstance(a, Ref) else text(a) for a in s.args
            )
            site = "" if s.site is None else f" or trap {s.site}"
            return f"call {s.routine}({args}){site}"
        case HostCall() | Invoke():
            sizes = s.sizes if isinstance(s, Invoke) else ()
            operands, results = (
                [_ref(r, text) for r in refs] for refs in (s.operands, s.results)
            )
            signature = f"({', '.join([*map(text, sizes), *operands])})"
            signature += f" -> {', '.join(results)}" * bool(results)
            if isinstance(s, HostCall):
                return f"host {s.site}{signature}"
            sites = f" with sites from {s.site}" * bool(s.function.sites)
            return f"invoke {s.function.name}{signature}{sites}"
        case Tick():
            notes = f"{' ends' * s.ends}{' always' * s.always}"
            return f"tick {s.site}: {text(s.done)} of {text(s.total)}{notes}"
        case Trap():
            values = ", ".join(text(v) for v in s.values)
            return f"trap {s.site} if {text(s.test)}{f' with {values}' * bool(values)}"
        case Barrier():
            return f"barrier {s.scope}"
        case Allocate():
            shape = ", ".join(map(text, s.buffer.shape))
            how = " again" * s.again + ", which keeps its rows" * s.keeps
            return f"allocate {s.buffer.name}[{shape}]{how}"
        case _:
            return repr(s)


def _place(buffer: Buffer, at: Sequence[Expr], text: Callable[..., str]) -> str:
    if not at and buffer.shape:
        return buffer.name  # all of it
    return f"{buffer.name}[{', '.join(text(i) for i in at)}]"


def _ref(ref: Ref, text: Callable[..., str]) -> str:
    if ref.rows is None:
        return _place(ref.buffer, ref.at, text)
    *before, first = ref.at
    run = f"{text(first)}:{text(add(first, ref.rows))}"
    return f"{ref.buffer.name}[{', '.join([*map(text, before), run])}]"


def _for(s: For, text: Callable[..., str]) -> str:
    kind, width = s.binding.kind, s.binding.width
    binding = "" if kind == "serial" else f" {kind}"
    if width != 1:
        binding += f" by {width}" if kind == "serial" else f" {width}"
    independent = " independent" if s.independent else ""
    return f"for {s.var.name} in 0..{text(s.extent)}{binding}{independent}:"


def _lines(s: Stmt, deep: bool = True) -> Iterator[str]:
    """Yield the lines of one statement; without its bodies unless `deep`."""
    namer = Namer(walk.expressions(s))
    text = namer.text
    match s:
        case For():
            header = _for(s, text)
            yield from (*namer.lines, header)
            if deep:
                yield from _indented(s.body)
        case While():
            header = f"while {text(s.test)}:"
            if s.head or namer.lines:
                yield "do:"
                if deep:
                    yield from _indented(s.head, namer.lines)
            yield header
            if deep:
                yield from _indented(s.body)
        case If():
            header = f"if {text(s.test)}:"
            yield from (*namer.lines, header)
            if deep:
                yield from _indented(s.then)
                if s.else_:
                    yield "else:"
                    yield from _indented(s.else_)
        case _:
            line = _simple(s, text)
            yield from (*namer.lines, line)


def _indented(body: Sequence[Stmt], more: Sequence[str] = ()) -> Iterator[str]:
    lines = [line for s in body for line in _lines(s)] + list(more)
    yield from (f"    {line}" for line in lines or ["pass"])


def format_statement(statement: Stmt, *, deep: bool = False) -> str:
    """Return the text of `statement`; without its bodies unless `deep`."""
    return "\n".join(_lines(statement, deep))


# --- programs -------------------------------------------------------------------------


def _buffer(buffer: Buffer) -> str:
    def extents(values: Sequence[Expr]) -> str:
        return ", ".join(map(format_expr, values))

    layout = "" if buffer.strides is None else f" strides [{extents(buffer.strides)}]"
    data = ""
    if buffer.data is not None:
        if buffer.data.size <= SHOWN:
            data = f" = {buffer.data.tolist()}"
        else:
            data = f" = crc32 {zlib.crc32(np.ascontiguousarray(buffer.data)):08x}"
    declaration = f"buffer {buffer.name}: {buffer.dtype}[{extents(buffer.shape)}]"
    return f"{declaration}{layout} in {buffer.space}{data}"


def format_program(program: Program) -> str:
    """Return the text of `program`, one statement a line, with a final newline."""
    sizes = ", ".join(f"{v.name}: {v.dtype}" for v in program.sizes)
    outputs = [b for b in program.outputs if b not in program.inputs]
    buffers = (*program.inputs, *outputs, *program.arena, *program.constants)
    sites = [
        f"site {number}: {site.detail or f'{site.kind} of node {site.node}'}"
        for number, site in enumerate(program.sites)
    ]
    head = [f"    {line}" for line in (*map(_buffer, buffers), *sites)]
    lines = [f"program {program.name}({sizes}):", *head, *_indented(program.body)]
    functions = "".join(f"{format_program(f)}\n" for f in program.functions)
    return functions + "\n".join(lines) + "\n"
