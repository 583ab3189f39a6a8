"""`return`, `break` and `continue` become the ends of branches and flags.

What follows an `if` in which one of them stands moves into the branches that go on. So
each stands at the end of its branch: a `break` there is a flag, a `continue` nothing; a
`return` within a loop is a flag and a `break`. One within a `with`, a `try` or a
`match` sets a flag, which is asked after that statement:

    with a:                       returned = False
        if b:                     with a:
            return c                  if b:
        d                                 result = c; returned = True
    e                                 else:
                                          d
                                  if returned:
                                      return result
                                  e
"""

import ast
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Final, TypeAlias, TypeVar

__all__ = [
    *("BROKEN", "LOOPS", "RESULT", "RETURNED", "SCOPES", "TAIL"),
    *("Loop", "at_line_of", "parsed", "unplace", "without_exits"),
]

TAIL: Final = "hopflow_tail"
"""An attribute of an `if`: both of its branches end in a `return`."""
BROKEN: Final = "hopflow_broken"
"""An attribute of a loop: the name of the flag that ends it, if there is one."""
RETURNED: Final = "hopflow_returned"
RESULT: Final = "hopflow_result"

Loop: TypeAlias = ast.While | ast.For | ast.AsyncFor
LOOPS: Final = (ast.While, ast.For, ast.AsyncFor)
SCOPES: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)

_Node = TypeVar("_Node", bound=ast.AST)
_Replacement: TypeAlias = Callable[[ast.stmt], list[ast.stmt]]
_EXITS: Final = (ast.Return, ast.Break, ast.Continue)
_BLOCKS: Final = ("body", "orelse", "finalbody")


def without_exits(
    function: ast.FunctionDef | ast.AsyncFunctionDef,
    assigns: Callable[[ast.expr], bool],
) -> None:
    """Rewrite the body of a function, in place.

    Args:
        assigns: Whether a condition may assign names.
    """
    rewriter = _Exits(assigns)
    body = rewriter.lowered(function.body)
    function.body = rewriter.settled(body, returns=True)


class _Exits:
    def __init__(self, assigns: Callable[[ast.expr], bool]) -> None:
        self.assigns = assigns
        self.count = 0

    def flag(self, name: str) -> str:
        self.count += 1
        return f"hopflow_{name}_{self.count}"

    # --- statements around exits ------------------------------------------------------

    def lowered(self, block: Sequence[ast.stmt]) -> list[ast.stmt]:
        """A block in which exits stand in itself and in `if` only."""
        found: list[ast.stmt] = []
        for statement in block:
            if isinstance(statement, SCOPES):
                found.append(statement)
                continue
            for part, name in _blocks_of(statement):
                setattr(part, name, self.lowered(getattr(part, name)))
            if isinstance(statement, LOOPS):
                found += self.loop(statement)
            elif isinstance(statement, ast.If) or not exits_of([statement]):
                found.append(statement)
            else:
                found += self.through(statement)
        return found

    def loop(self, loop: Loop) -> list[ast.stmt]:
        """A loop, with what goes before and after it."""
        exits = {*map(type, exits_of(loop.body))}
        otherwise, loop.orelse = loop.orelse, []
        if not exits:
            return [loop, *otherwise]
        leaves = bool(exits & {ast.Break, ast.Return})
        broke = self.flag("broke")
        before = parsed(f"{broke} = False", loop) if leaves else []
        after: list[ast.stmt] = []
        asks = leaves and isinstance(loop, ast.While) and self.assigns(loop.test)
        if otherwise and (ast.Break in exits or asks):
            ended = self.flag("ended") if asks else f"not {broke}"
            otherwise = [_if(ended, otherwise, loop)]
        if ast.Return in exits:
            before += parsed(f"{RETURNED} = False", loop)
            loop.body = _replaced(loop.body, {ast.Return: _return_and_break})
            after = parsed(f"return {RESULT}", loop)
            is_endless = isinstance(loop, ast.While) and _is_true(loop.test)
            if ast.Break in exits or not is_endless:
                after = [_if(RETURNED, after, loop), *otherwise]
        else:
            after = otherwise
        if leaves:
            setattr(loop, BROKEN, broke)
        loop.body = self.settled(loop.body, returns=False)
        flags = {ast.Break: _sets(broke), ast.Continue: _nothing}
        loop.body = _replaced(loop.body, flags) or parsed("pass", loop)
        if asks:
            # The condition is asked in the loop: where it is left, not once more.
            assert isinstance(loop, ast.While)
            ends = parsed(f"{broke} = True", loop)
            if otherwise:
                before += parsed(f"{ended} = False", loop)
                ends += parsed(f"{ended} = True", loop)
            loop.body = [at_line_of(ast.If(loop.test, loop.body, ends), loop)]
            loop.test = ast.copy_location(ast.Constant(True), loop.test)
        return [*before, loop, *after]

    def through(self, statement: ast.stmt) -> list[ast.stmt]:
        """A statement whose exits become flags, which are asked after it."""
        if exits_of(getattr(statement, "finalbody", [])):
            return self.finally_leaves(statement)
        in_body = {*map(type, exits_of(getattr(statement, "body", [])))}
        before: list[ast.stmt] = []
        after: list[ast.stmt] = []
        flags: dict[type[ast.stmt], str] = {}
        for leave in exits_of([statement]):
            if type(leave) in flags:
                continue
            is_return = isinstance(leave, ast.Return)
            flag = RETURNED if is_return else self.flag(type(leave).__name__.lower())
            flags[type(leave)] = flag
            before += parsed(f"{flag} = False", statement)
            out = at_line_of(type(leave)(), statement)
            if is_return:
                [out] = parsed(f"return {RESULT}", statement)
            after.append(_if(flag, [out], statement))
        setters = {kind: _sets(flag) for kind, flag in flags.items()}
        setters[ast.Return] = _return
        for part, name in _blocks_of(statement):
            block = getattr(part, name)
            if exits_of(block):
                settled = self.settled(block, returns=False)
                setattr(part, name, _replaced(settled, setters))
        if (
            isinstance(statement, ast.Try | ast.TryStar)
            and in_body
            and statement.orelse
        ):
            none = " and ".join(f"not {f}" for k, f in flags.items() if k in in_body)
            statement.orelse = [_if(none, statement.orelse, statement)]
        return [*before, statement, *after]

    def finally_leaves(self, statement: ast.stmt) -> list[ast.stmt]:
        """A `try` whose `finally` leaves, and so drops the error that is on its way."""
        assert isinstance(statement, ast.Try | ast.TryStar)
        final, statement.finalbody = statement.finalbody, []
        error = self.flag("error")
        caught = parsed(
            f"{error} = None\ntry:\n    pass\nexcept BaseException as hopflow_caught:\n"
            f"    {error} = hopflow_caught",
            statement,
        )
        around = caught[1]
        assert isinstance(around, ast.Try)
        exits = exits_of([statement])
        inner: list[ast.stmt] = [statement]
        if exits:
            inner = self.through(statement)
        asks = len({*map(type, exits)})  # they are asked after the `finally`
        around.body = inner[: len(inner) - asks]
        if not (statement.handlers or statement.orelse):
            place = around.body.index(statement)
            around.body[place : place + 1] = statement.body
        final = _with_before(final, parsed(f"{RETURNED} = False", statement))
        again = parsed(f"if {error} is not None:\n    raise {error}", statement)
        return [*caught, *final, *again, *inner[len(inner) - asks :]]

    # --- branches ---------------------------------------------------------------------

    def settled(self, block: Sequence[ast.stmt], *, returns: bool) -> list[ast.stmt]:
        """A block in which exits stand at the ends of branches only.

        Args:
            returns: Whether it is a function's, and so ends in a `return`.
        """
        found: list[ast.stmt] = []
        rest = list(block)
        while rest:
            statement = rest.pop(0)
            if isinstance(statement, _EXITS):
                return [*found, statement]
            if not isinstance(statement, ast.If) or not exits_of([statement]):
                found.append(statement)
                continue
            ways = _goes_on([statement])
            if ways > 1 and _is_long(rest):
                # Each branch would get a copy of the rest, and each copy such copies.
                rest = [*self.through(statement), *rest]
                continue
            for name in ("body", "orelse"):
                branch: list[ast.stmt] = getattr(statement, name)
                if _goes_on(branch):
                    branch = [*branch, *(deepcopy(rest) if ways > 1 else rest)]
                setattr(statement, name, self.settled(branch, returns=returns))
            if returns:
                setattr(statement, TAIL, True)
            return [*found, statement]
        if returns and not (found and _always_leaves(found[-1])):
            where = found[-1] if found else ast.Pass(lineno=1, col_offset=0)
            found.append(at_line_of(ast.Return(), where))
        return found


# --- what leaves ----------------------------------------------------------------------


def _blocks_of(statement: ast.stmt) -> list[tuple[ast.AST, str]]:
    """The blocks of a statement: whose they are, and the name of the field."""
    parts: list[ast.AST] = [statement]
    parts += getattr(statement, "handlers", ())
    parts += getattr(statement, "cases", ())
    return [
        (part, name)
        for part in parts
        for name in _BLOCKS
        if isinstance(getattr(part, name, None), list) and getattr(part, name)
    ]


def exits_of(block: Sequence[ast.stmt]) -> list[ast.stmt]:
    """The exits in a block, but for those of loops and functions within."""
    found: list[ast.stmt] = []
    for statement in block:
        if isinstance(statement, _EXITS):
            found.append(statement)
        elif not isinstance(statement, SCOPES):
            for part, name in _blocks_of(statement):
                inside = exits_of(getattr(part, name))
                if isinstance(statement, LOOPS) and name == "body":
                    inside = [e for e in inside if isinstance(e, ast.Return)]
                found += inside
    return found


def _always_leaves(statement: ast.stmt) -> bool:
    if isinstance(statement, (*_EXITS, ast.Raise)):
        return True
    return isinstance(statement, ast.If) and not _goes_on([statement])


def _goes_on(block: Sequence[ast.stmt]) -> int:
    """How many of the ways through a block go on after it, as far as `if` makes them;
    2 stands for more."""
    ways = 1
    for statement in block:
        if isinstance(statement, (*_EXITS, ast.Raise)):
            return 0
        if isinstance(statement, ast.If) and exits_of([statement]):
            ways *= _goes_on(statement.body) + _goes_on(statement.orelse)
    return min(ways, 2)


def _is_true(test: ast.expr) -> bool:
    return isinstance(test, ast.Constant) and bool(test.value)


def _is_long(block: Sequence[ast.stmt]) -> bool:
    simple = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Pass, *_EXITS)
    return len(block) > 3 or not all(isinstance(s, simple) for s in block)


# --- flags ----------------------------------------------------------------------------


def _replaced(
    block: Sequence[ast.stmt], by: Mapping[type[ast.stmt], _Replacement]
) -> list[ast.stmt]:
    """A block with other statements for its exits, as far as `if` has them."""
    found: list[ast.stmt] = []
    for statement in block:
        if make := by.get(type(statement)):
            found += make(statement)
            continue
        if isinstance(statement, ast.If):
            statement.body = _replaced(statement.body, by)
            statement.orelse = _replaced(statement.orelse, by)
        found.append(statement)
    return found or parsed("pass", block[0]) if block else []


def _return(statement: ast.stmt) -> list[ast.stmt]:
    assert isinstance(statement, ast.Return)
    value = statement.value or ast.Constant(None)
    stored = ast.Assign([ast.Name(RESULT, ast.Store())], value)
    # The value first: where it raises, nothing has returned.
    return [at_line_of(stored, statement), *parsed(f"{RETURNED} = True", statement)]


def _return_and_break(statement: ast.stmt) -> list[ast.stmt]:
    return [*_return(statement), at_line_of(ast.Break(), statement)]


def _sets(flag: str) -> _Replacement:
    return lambda statement: parsed(f"{flag} = True", statement)


def _nothing(_: ast.stmt) -> list[ast.stmt]:
    return []


def _with_before(
    block: Sequence[ast.stmt], before: Sequence[ast.stmt]
) -> list[ast.stmt]:
    """A block that does something before it leaves by a `break` or `continue`."""

    def first(statement: ast.stmt) -> list[ast.stmt]:
        return [*deepcopy(before), statement]

    return _replaced(block, {ast.Break: first, ast.Continue: first})


def _if(test: str, block: list[ast.stmt], where: ast.stmt) -> ast.If:
    [made] = parsed(f"if {test}:\n    pass", where)
    assert isinstance(made, ast.If)
    made.body = block
    return made


# --- code -----------------------------------------------------------------------------


def at_line_of(node: _Node, where: ast.stmt | ast.expr) -> _Node:
    """A node that was made, with all that was made below it, on the line of another."""
    for made in ast.walk(node):
        if "lineno" in made._attributes and not hasattr(made, "lineno"):
            place = {"lineno": where.lineno, "col_offset": where.col_offset}
            ends = {f"end_{name}": value for name, value in place.items()}
            for name, value in {**place, **ends}.items():
                setattr(made, name, value)
    return node


def unplace(node: ast.AST) -> None:
    """Forget the lines of a node that was parsed: it gets those of the user's."""
    for part in ast.walk(node):
        for name in ("lineno", "end_lineno", "col_offset", "end_col_offset"):
            if hasattr(part, name):
                delattr(part, name)


def parsed(text: str, where: ast.stmt) -> list[ast.stmt]:
    """Statements that stand on the line of another node."""
    block = ast.parse(text).body
    for statement in block:
        unplace(statement)
    return [at_line_of(statement, where) for statement in block]
