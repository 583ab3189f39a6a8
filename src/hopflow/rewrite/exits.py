"""`return`, `break` and `continue` become the ends of branches and flags.

What follows an `if` in which one of them stands moves into the branches that go on. So
each stands at the end of its branch: a `break` there is a flag, a `continue` nothing; a
`return` within a loop is a flag and a `break`. What cannot be rewritten so is marked as
plain, with the reason: it stays Python, and must not depend on a tensor.
"""

import ast
from collections.abc import Sequence
from copy import deepcopy
from typing import Final, TypeAlias, TypeVar

__all__ = [
    *("BROKEN", "PLAIN", "RESULT", "RETURNED", "SCOPES", "TAIL"),
    *("Loop", "at_line_of", "exits_of", "parsed", "unplace", "without_exits"),
]

PLAIN: Final = "hopflow_plain"
"""An attribute of an `if` or a loop: why it stays as it is."""
TAIL: Final = "hopflow_tail"
"""An attribute of an `if`: both of its branches end in a `return`."""
BROKEN: Final = "hopflow_broken"
"""An attribute of a loop: the name of the flag that ends it, if there is one."""
RETURNED: Final = "returned_"
RESULT: Final = "result_"
_BROKE: Final = "broke_"

Loop: TypeAlias = ast.While | ast.For
_Node = TypeVar("_Node", bound=ast.AST)
_EXITS: Final = (ast.Return, ast.Break, ast.Continue)
SCOPES: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def without_exits(function: ast.FunctionDef) -> None:
    """Rewrite the body of a function, in place."""
    rewriter = _Exits()
    body = rewriter.loops(function.body)
    function.body = rewriter.settled(body, returns=True)


class _Exits:
    def __init__(self) -> None:
        self.count = 0

    # --- loops ------------------------------------------------------------------------

    def loops(self, block: Sequence[ast.stmt]) -> list[ast.stmt]:
        """A block whose loops have no exits any more, from the innermost on."""
        found: list[ast.stmt] = []
        for statement in block:
            for name in ("body", "orelse", "finalbody"):
                inner = getattr(statement, name, None)
                if isinstance(inner, list) and not isinstance(statement, SCOPES):
                    setattr(statement, name, self.loops(inner))
            if isinstance(statement, ast.While | ast.For):
                found += self.loop(statement)
            else:
                found.append(statement)
        return found

    def loop(self, loop: Loop) -> list[ast.stmt]:
        """A loop, with what goes before and after it."""
        exits = exits_of(loop.body)
        if not exits:
            after, loop.orelse = loop.orelse, []
            return [loop, *after]
        if reason := _unsettled(loop.body):
            setattr(loop, PLAIN, reason)
            return [loop]
        before: list[ast.stmt] = []
        after = []
        self.count += 1
        broke = f"{_BROKE}{self.count}"
        if any(isinstance(e, ast.Return) for e in exits):
            before = parsed(f"{RETURNED} = False", loop)
            loop.body = _returns_broken(loop.body)
            after = parsed(f"if {RETURNED}:\n    return {RESULT}", loop)
        if any(isinstance(e, ast.Return | ast.Break) for e in exits):
            before += parsed(f"{broke} = False", loop)
            setattr(loop, BROKEN, broke)
            if not any(isinstance(e, ast.Break) for e in exits):
                after = [*after, *loop.orelse]  # what has returned does not come here
            elif loop.orelse:
                [test] = parsed(f"if not {broke}:\n    pass", loop)
                assert isinstance(test, ast.If)
                test.body = loop.orelse
                after = [*after, test]
        else:
            after = [*after, *loop.orelse]
        loop.orelse = []
        loop.body = self.settled(loop.body, returns=False)
        loop.body = _flagged(loop.body, broke) or parsed("pass", loop)
        return [*before, loop, *after]

    # --- branches ---------------------------------------------------------------------

    def settled(self, block: Sequence[ast.stmt], *, returns: bool) -> list[ast.stmt]:
        """A block in which exits stand at the ends of branches only.

        Args:
            returns: Whether it is a function's, and so ends in a `return`.
        """
        kinds: tuple[type[ast.stmt], ...] = (ast.Return,) if returns else _EXITS
        found: list[ast.stmt] = []
        for k, statement in enumerate(block):
            if isinstance(statement, kinds):
                return [*found, statement]
            if isinstance(statement, ast.If) and exits_of([statement]):
                if reason := _unsettled([statement]):
                    setattr(statement, PLAIN, reason)
                else:
                    rest = list(block[k + 1 :])
                    self.absorb(statement, rest, returns=returns)
                    return [*found, statement]
            found.append(statement)
        if returns and not (found and _always_leaves(found[-1])):
            where = found[-1] if found else ast.Pass(lineno=1, col_offset=0)
            found.append(at_line_of(ast.Return(ast.Constant(None)), where))
        return found

    def absorb(self, branch: ast.If, rest: list[ast.stmt], *, returns: bool) -> None:
        """What follows an `if` becomes a part of those of its branches that go on."""
        for name in ("body", "orelse"):
            own: list[ast.stmt] = getattr(branch, name)
            if not (own and _always_leaves(own[-1])):
                own = [*own, *deepcopy(rest)]
            setattr(branch, name, self.settled(own, returns=returns))
        if returns:
            setattr(branch, TAIL, True)


# --- what leaves ----------------------------------------------------------------------


def exits_of(block: Sequence[ast.stmt]) -> list[ast.stmt]:
    """The exits in a block, but for those of loops and functions within."""
    found: list[ast.stmt] = []
    for statement in block:
        if isinstance(statement, _EXITS):
            found.append(statement)
        elif not isinstance(statement, SCOPES):
            for name in ("body", "orelse", "finalbody"):
                inner = getattr(statement, name, None)
                if isinstance(inner, list):
                    inside = exits_of(inner)
                    if isinstance(statement, ast.While | ast.For) and name == "body":
                        inside = [e for e in inside if isinstance(e, ast.Return)]
                    found += inside
            for handler in getattr(statement, "handlers", ()):
                found += exits_of(handler.body)
            for case in getattr(statement, "cases", ()):
                found += exits_of(case.body)
    return found


def _unsettled(block: Sequence[ast.stmt]) -> str | None:
    """Why exits in a block cannot move to the ends of branches: where one stands."""
    for statement in block:
        if isinstance(statement, ast.If):
            inner = _unsettled(statement.body) or _unsettled(statement.orelse)
            if inner:
                return inner
        elif isinstance(statement, (*_EXITS, *SCOPES)):
            continue
        elif found := exits_of([statement]):
            kind, around = (type(n).__name__.lower() for n in (found[0], statement))
            return f"a `{kind}` stands within a `{around}`"
    return None


def _always_leaves(statement: ast.stmt) -> bool:
    if isinstance(statement, (*_EXITS, ast.Raise)):
        return True
    return (
        isinstance(statement, ast.If)
        and bool(statement.orelse)
        and _always_leaves(statement.body[-1])
        and _always_leaves(statement.orelse[-1])
    )


# --- flags ----------------------------------------------------------------------------


def _returns_broken(block: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Each `return` of a loop's body as flag, result and `break`."""
    found: list[ast.stmt] = []
    for statement in block:
        if isinstance(statement, ast.Return):
            value = statement.value or at_line_of(ast.Constant(None), statement)
            found += parsed(f"{RETURNED} = True", statement)
            stored = ast.Name(RESULT, ast.Store())
            found.append(at_line_of(ast.Assign([stored], value), statement))
            found.append(at_line_of(ast.Break(), statement))
            continue
        if isinstance(statement, ast.If):
            statement.body = _returns_broken(statement.body)
            statement.orelse = _returns_broken(statement.orelse)
        found.append(statement)
    return found


def _flagged(block: Sequence[ast.stmt], flag: str) -> list[ast.stmt]:
    """A settled block, with `break` as a flag that is set, and without `continue`."""
    found: list[ast.stmt] = []
    for statement in block:
        if isinstance(statement, ast.Break):
            found += parsed(f"{flag} = True", statement)
        elif not isinstance(statement, ast.Continue):
            if isinstance(statement, ast.If) and not hasattr(statement, PLAIN):
                statement.body = _flagged(statement.body, flag) or parsed(
                    "pass", statement
                )
                statement.orelse = _flagged(statement.orelse, flag)
            found.append(statement)
    return found


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
