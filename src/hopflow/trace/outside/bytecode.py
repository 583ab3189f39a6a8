"""Static analysis of bytecode: the chains of loads by which code reads values.

`cfg.layers[0].w` is compiled to `LOAD cfg`, `LOAD_ATTR layers`, `LOAD_CONST 0`, a
subscript and `LOAD_ATTR w`, one after the other. Such a chain is a `Load`: a variable,
and the steps from its value. A code object is analysed once; while it runs, each `Load`
is evaluated when its first instruction is reached, so that code which does not run
reads nothing.
"""

import dis
from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import CodeType
from typing import Any, Final, NamedTuple


class Step(NamedTuple):
    """One step of an access path.

    kind   "attribute" and "item" with a constant key; "item of" and "attribute of",
           whose key is the value of a variable, which has a `Load` of its own; or "any
           attribute", whose name is computed and unknown
    key    the name of the attribute, the key of the item, or the variable that holds it
    """

    kind: str
    key: Any


class Load(NamedTuple):
    """A chain of loads.

    kind       the start: "global", "free" (a variable of an enclosing function),
               "local", "import" (a module just imported), "super" (an attribute of
               `super()`), "globals" (the result of `globals()`), "modules" (a module by
               name, which a call may return), or "result": a value that another
               instruction left on the stack
    name       the variable, the attribute, or the module as in the import statement,
               with its dots; "" for the others
    steps      the steps from its value
    is_used    whether the value of the chain is used other than to store it in a
               variable
    taker      what may take items from the value, if it is an iterator: a "call" of
               which it is an argument, or a "loop", `next` and the like; "" if it is
               only stored, tested or compared
    binds      the step from the value to the target of an assignment, as in `a.b = c`,
               `a.b += c` and `a[1] = c`; None: there is none, or its key is computed
    """

    kind: str
    name: str
    steps: tuple[Step, ...]
    is_used: bool
    taker: str = ""
    binds: Step | None = None


class Store(NamedTuple):
    """An assignment to a global variable, or to one of an enclosing function.

    is_global  whether the variable is a global
    """

    name: str
    is_global: bool
    line: int | None


@lru_cache(1 << 12)
def stores_of(code: CodeType) -> tuple[Store, ...]:
    """Return the assignments of code to globals and free variables."""
    stores = dict[str, Store]()
    for i in dis.get_instructions(code):
        is_global, name = i.opname == "STORE_GLOBAL", i.argval
        if is_global or (i.opname == "STORE_DEREF" and name in code.co_freevars):
            line = None if i.positions is None else i.positions.lineno
            stores[name] = Store(name, is_global, line)
    return tuple(stores.values())


def sets_attributes(code: CodeType) -> bool:
    """Whether code assigns an attribute of any object."""
    return any(i.opname == "STORE_ATTR" for i in dis.get_instructions(code))


@lru_cache(1 << 12)
def globals_of(code: CodeType) -> tuple[str, ...]:
    """Return the globals that code reads."""
    loads = (i for i in dis.get_instructions(code) if i.opname in _GLOBALS)
    return tuple(dict.fromkeys(i.argval for i in loads))


class _Op(NamedTuple):
    """An instruction, or one half of a fused instruction.

    at     the offset at which to evaluate it: its variable has a value by then
    starts whether it is a jump target
    """

    kind: str
    value: Any
    at: int
    starts: bool


_SKIPPED: Final = frozenset(("CACHE", "EXTENDED_ARG", "NOP", "PUSH_NULL", "PRECALL"))
_GLOBALS: Final = frozenset(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"))
_FREE: Final = frozenset(("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"))
_STORES: Final = frozenset(("STORE_FAST", "STORE_DEREF", "STORE_NAME", "POP_TOP"))
_VARIABLES: Final = frozenset(("global", "free", "local"))
_KEYS: Final = frozenset((*_VARIABLES, "constant"))
_DYNAMIC: Final = frozenset(("getattr", "hasattr"))
_PUSHES: Final = frozenset((*_VARIABLES, "constant", "attribute", "item"))
# Builtins that take no items from an iterator.
_TESTS: Final = frozenset(("callable", "hash", "id", "isinstance", "repr", "type"))
_TAKERS: Final = frozenset(("enumerate", "iter", "list", "next", "tuple"))
_KEEPS: Final = (
    *("BUILD_", "COMPARE_", "DELETE_", "FORMAT_", "IS_", "JUMP_", "POP_", "RETURN_"),
    *("STORE_", "COPY", "LIST_APPEND", "MAP_ADD", "SET_ADD", "TO_BOOL", "UNARY_NOT"),
    "YIELD_VALUE",
)


def loads_of(code: CodeType) -> dict[int, tuple[Load, ...]]:
    """Return the loads of a code object, by the offsets of the instructions at which to
    evaluate them."""
    ops, loads_at = list(_ops(code)), dict[int, list[Load]]()
    k = 0
    while k < len(ops):
        op, start = ops[k], k
        k += 1
        if length := _before_key(ops, start):
            load = Load("globals", "", (_key(ops[start + length]),), is_used=True)
            k = start + length + 2
        elif _is_globals(ops, start) and (target := _binds(ops, start + 2)):
            load = Load("globals", "", (target,), is_used=True, binds=target)
            loads_at.setdefault(op.at, []).append(load)
            continue
        elif op.kind in _VARIABLES:
            load = _variable(op)
        elif op.kind == "super" or _is_of_super(ops, start):
            load = Load("super", op.value, (), is_used=True)
            loads_at.setdefault(op.at, []).append(load)
            continue
        elif op.kind == "attribute":
            load = Load("result", "", (Step("attribute", op.value),), is_used=True)
        elif op.kind == "import":
            module, name = op.value
            load = Load("import", module, (Step("attribute", name),), is_used=False)
            loads_at.setdefault(op.at, []).append(load)
            continue
        elif op.kind == "bind":
            step = Step("attribute", op.value)
            load = Load("result", "", (), is_used=True, binds=step)
            loads_at.setdefault(op.at, []).append(load)
            continue
        else:
            continue
        steps, k = _steps(ops, k)
        # The variable of a key is read too.
        for key in ops[start + 1 : k]:
            if key.kind in _VARIABLES:
                loads_at.setdefault(key.at, []).append(_variable(key))
        steps = (*load.steps, *steps)
        if start and ops[start - 1].value == "vars":
            steps += (Step("attribute", "__dict__"),)
            if ops[k].kind == "call":
                items, k = _steps(ops, k + 1)
                steps += items
        elif start and ops[start - 1].value in _DYNAMIC and k < len(ops):
            steps += _dynamic(ops, k)
        is_used = k == len(ops) or ops[k].kind != "store" or ops[k].starts
        load = load._replace(steps=steps, is_used=is_used)
        if is_used:
            binds = _binds(ops, k)
            load = load._replace(taker=_taker(ops, start, k), binds=binds)
        loads_at.setdefault(op.at, []).append(load)
        if load.kind == "result" and start > 1 and ops[start - 1].kind == "call":
            name = ops[start - 2]  # as in `import_module(name).value`
            if name.kind in _KEYS:
                of_name = load._replace(kind="modules", steps=(_key(name), *load.steps))
                loads_at[op.at].append(of_name)
    return {at: tuple(loads) for at, loads in loads_at.items()}


def _taker(ops: Sequence[_Op], start: int, end: int) -> str:
    """Return what may take items from the value of the chain `ops[start:end]`; see
    `Load.taker`."""
    if start and ops[start - 1].kind == "global":
        if ops[start - 1].value in _TESTS:
            return ""
        if ops[start - 1].value in _TAKERS:
            return "loop"
    rest = (op.kind for op in ops[end:] if op.kind not in _PUSHES)
    kind = next(rest, "keep")
    return {"call": "call", "other": "loop"}.get(kind, "")


def _binds(ops: Sequence[_Op], k: int) -> Step | None:
    """Return the step to the target of the assignment at `k`; see `Load.binds`."""
    kinds = [op.kind for op in ops[k : k + 3]]
    if kinds[:1] == ["bind"]:
        return Step("attribute", ops[k].value)
    if kinds[:2] == ["copy", "attribute"]:  # `a.b += c` uses `a` twice
        return Step("attribute", ops[k + 1].value)
    is_item = kinds[1:2] == ["bind item"] or kinds[1:] == ["copy", "copy"]
    return _key(ops[k]) if is_item and kinds[0] in _KEYS else None


def _is_of_super(ops: Sequence[_Op], k: int) -> bool:
    """Whether the attribute at `k` is one of the preceding `super()`."""
    if k < 2 or ops[k].kind != "attribute" or ops[k - 1].kind != "call":
        return False
    return ops[k - 2].kind == "global" and ops[k - 2].value == "super"


def _before_key(ops: Sequence[_Op], k: int) -> int:
    """Return the number of instructions of `globals()[` or `globals().get(` at `k`,
    before the key; 0: there is something else."""
    kinds = [op.kind for op in ops[k : k + 5]]
    if not _is_globals(ops, k):
        return 0
    if kinds[2:3] == ["attribute"] and ops[k + 2].value == "get":
        return 3 if kinds[3:4] and kinds[3] in _KEYS else 0
    return 2 if kinds[3:4] == ["item"] and kinds[2] in _KEYS else 0


def _is_globals(ops: Sequence[_Op], k: int) -> bool:
    """Whether `globals()` is at `k`."""
    kinds = [op.kind for op in ops[k : k + 2]]
    return kinds == ["global", "call"] and ops[k].value == "globals"


def _key(op: _Op) -> Step:
    """Return the step to an item whose key this instruction loads."""
    if op.kind == "constant":
        return Step("item", op.value)
    return Step("item of", (op.kind, op.value))


def _variable(op: _Op) -> Load:
    """Return the load of a variable, without steps."""
    return Load(op.kind, op.value, (), is_used=True)


def _steps(ops: Sequence[_Op], k: int) -> tuple[tuple[Step, ...], int]:
    """Return the steps that begin at `k`, and the position after them."""
    steps: list[Step] = []
    while k < len(ops) and not ops[k].starts:
        op = ops[k]
        if op.kind == "attribute":
            steps.append(Step("attribute", op.value))
            k += 1
        elif k + 1 < len(ops) and ops[k + 1].kind == "item" and not ops[k + 1].starts:
            if op.kind not in _KEYS:
                break
            steps.append(_key(op))
            k += 2
        else:
            break
    return tuple(steps), k


def _dynamic(ops: Sequence[_Op], k: int) -> tuple[Step, ...]:
    """Return the step of `getattr(value, name)`, whose name is loaded at `k`."""
    name, after = ops[k], k + 1
    if after < len(ops) and ops[after].kind in ("constant", *_VARIABLES):  # a default
        after = _steps(ops, after + 1)[1]
    is_alone = after < len(ops) and ops[after].kind == "call"
    if is_alone and name.kind == "constant" and isinstance(name.value, str):
        return (Step("attribute", name.value),)
    if is_alone and name.kind in _VARIABLES:
        return (Step("attribute of", (name.kind, name.value)),)
    return (Step("any attribute", None),)


def _ops(code: CodeType) -> Iterator[_Op]:
    """Yield the instructions of code, with fused ones divided into two."""
    instructions = [i for i in dis.get_instructions(code) if i.opname not in _SKIPPED]
    ends = [i.offset for i in instructions[1:]] + [len(code.co_code)]
    module = ""
    for k, (i, after) in enumerate(zip(instructions, ends, strict=True)):
        name, starts = i.opname, i.is_jump_target
        if name in _GLOBALS:
            yield _Op("global", i.argval, i.offset, starts)
        elif name in _FREE:
            yield _Op("free", i.argval, i.offset, starts)
        elif name in ("LOAD_ATTR", "LOAD_METHOD"):
            yield _Op("attribute", i.argval, i.offset, starts)
        elif name == "BINARY_SUBSCR" or (name == "BINARY_OP" and i.argrepr == "[]"):
            yield _Op("item", None, i.offset, starts)
        elif name in ("LOAD_CONST", "LOAD_SMALL_INT"):
            yield _Op("constant", i.argval, i.offset, starts)
        elif name == "STORE_FAST_LOAD_FAST":  # assigned only after the instruction
            yield _Op("store", i.argval[0], i.offset, starts)
            yield _Op("local", i.argval[1], after, False)
        elif name.startswith("LOAD_FAST") and name != "LOAD_FAST_AND_CLEAR":
            names = i.argval if isinstance(i.argval, tuple) else (i.argval,)
            for n, local in enumerate(names):
                yield _Op("local", local, i.offset, starts and n == 0)
        elif name in _STORES or name == "STORE_FAST_STORE_FAST":
            yield _Op("store", i.argval, i.offset, starts)
        elif name == "STORE_ATTR":
            yield _Op("bind", i.argval, i.offset, starts)
        elif name == "STORE_SUBSCR":
            yield _Op("bind item", None, i.offset, starts)
        elif name == "COPY":
            yield _Op("copy", None, i.offset, starts)
        elif name == "LOAD_SUPER_ATTR":
            yield _Op("super", i.argval, i.offset, starts)
        elif name == "IMPORT_FROM":  # the module is imported by now
            yield _Op("import", (module, i.argval), i.offset, starts)
        else:
            if name == "IMPORT_NAME":  # preceded by the level and the names
                module = "." * instructions[k - 2].argval + i.argval
            kind = "keep" if name.startswith(_KEEPS) else "other"
            if name.startswith(("CALL", "KW_NAMES")):
                kind = "call"
            yield _Op(kind, None, i.offset, starts)
