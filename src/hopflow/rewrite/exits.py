"""Elimination of exits: `return`, `break` and `continue` become branches and flags.

Statements that follow an `if` with an exit move into the branches without one, so that
each exit is at the end of a branch. There a `break` sets a flag, a `continue` vanishes,
and a `return` in a loop sets a flag and breaks. An exit in a `with`, a `try` or a
`match` sets a flag, which is tested after that statement:

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
"""An attribute of an `if` node: both of its branches end in a `return`."""
BROKEN: Final = "hopflow_broken"
"""An attribute of a loop node: the name of the flag that ends the loop."""
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
    """Eliminate the exits of a function in place.

    Args:
        assigns: Whether a condition may assign names.
    """
    rewriter = _Exits(assigns)
    body = rewriter.lowered(function.body)
    function.body = rewriter.settled(body, returns=True)


class _Exits:
    """Eliminates the exits of one function."""

    def __init__(self, assigns: Callable[[ast.expr], bool]) -> None:
        self.assigns = assigns
        self.count = 0

    def flag(self, name: str) -> str:
        """Return a new name for a flag."""
        self.count += 1
        return f"hopflow_{name}_{self.count}"

    # --- statements around exits ------------------------------------------------------

    def lowered(self, block: Sequence[ast.stmt]) -> list[ast.stmt]:
        """Return a block with exits only at its top level and in `if` statements."""
        statements: list[ast.stmt] = []
        for statement in block:
            if isinstance(statement, SCOPES):
                statements.append(statement)
                continue
            for part, name in _blocks_of(statement):
                setattr(part, name, self.lowered(getattr(part, name)))
            if isinstance(statement, LOOPS):
                statements += self.loop(statement)
            elif isinstance(statement, ast.If) or not exits_of([statement]):
                statements.append(statement)
            else:
                statements += self.through(statement)
        return statements

    def loop(self, loop: Loop) -> list[ast.stmt]:
        """Return a loop without exits, with the statements before and after it."""
        exits = {*map(type, exits_of(loop.body))}
        otherwise, loop.orelse = loop.orelse, []
        if not exits:
            return [loop, *otherwise]
        can_break = bool(exits & {ast.Break, ast.Return})
        broke = self.flag("broke")
        before = parsed(f"{broke} = False", loop) if can_break else []
        after: list[ast.stmt] = []
        moves_test = (
            can_break and isinstance(loop, ast.While) and self.assigns(loop.test)
        )
        if otherwise and (ast.Break in exits or moves_test):
            ended = self.flag("ended") if moves_test else f"not {broke}"
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
        if can_break:
            setattr(loop, BROKEN, broke)
        loop.body = self.settled(loop.body, returns=False)
        flags = {ast.Break: _sets(broke), ast.Continue: _nothing}
        loop.body = _replaced(loop.body, flags) or parsed("pass", loop)
        if moves_test:
            # The condition moves into the loop, so that a `break` does not evaluate it.
            assert isinstance(loop, ast.While)
            on_end = parsed(f"{broke} = True", loop)
            if otherwise:
                before += parsed(f"{ended} = False", loop)
                on_end += parsed(f"{ended} = True", loop)
            loop.body = [at_line_of(ast.If(loop.test, loop.body, on_end), loop)]
            loop.test = ast.copy_location(ast.Constant(True), loop.test)
        return [*before, loop, *after]

    def through(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return a statement whose exits become flags, which are tested after it."""
        if exits_of(getattr(statement, "finalbody", [])):
            return self.finally_leaves(statement)
        in_body = {*map(type, exits_of(getattr(statement, "body", [])))}
        before: list[ast.stmt] = []
        after: list[ast.stmt] = []
        flags: dict[type[ast.stmt], str] = {}
        for exit_ in exits_of([statement]):
            if type(exit_) in flags:
                continue
            is_return = isinstance(exit_, ast.Return)
            flag = RETURNED if is_return else self.flag(type(exit_).__name__.lower())
            flags[type(exit_)] = flag
            before += parsed(f"{flag} = False", statement)
            real_exit = at_line_of(type(exit_)(), statement)
            if is_return:
                [real_exit] = parsed(f"return {RESULT}", statement)
            after.append(_if(flag, [real_exit], statement))
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
            no_exit = " and ".join(f"not {f}" for k, f in flags.items() if k in in_body)
            statement.orelse = [_if(no_exit, statement.orelse, statement)]
        return [*before, statement, *after]

    def finally_leaves(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return a `try` whose `finally` has an exit, which discards pending errors."""
        assert isinstance(statement, ast.Try | ast.TryStar)
        final, statement.finalbody = statement.finalbody, []
        error = self.flag("error")
        caught = parsed(
            f"{error} = None\ntry:\n    pass\nexcept BaseException as hopflow_caught:\n"
            f"    {error} = hopflow_caught",
            statement,
        )
        outer_try = caught[1]
        assert isinstance(outer_try, ast.Try)
        exits = exits_of([statement])
        inner: list[ast.stmt] = [statement]
        if exits:
            inner = self.through(statement)
        num_tests = len({*map(type, exits)})  # tests of flags go after the `finally`
        outer_try.body = inner[: len(inner) - num_tests]
        if not (statement.handlers or statement.orelse):
            position = outer_try.body.index(statement)
            outer_try.body[position : position + 1] = statement.body
        final = _with_before(final, parsed(f"{RETURNED} = False", statement))
        reraise = parsed(f"if {error} is not None:\n    raise {error}", statement)
        return [*caught, *final, *reraise, *inner[len(inner) - num_tests :]]

    # --- branches ---------------------------------------------------------------------

    def settled(self, block: Sequence[ast.stmt], *, returns: bool) -> list[ast.stmt]:
        """Return a block with exits only at the ends of branches.

        Args:
            returns: Whether it is the body of a function, which must end in a `return`.
        """
        statements: list[ast.stmt] = []
        rest = list(block)
        while rest:
            statement = rest.pop(0)
            if isinstance(statement, _EXITS):
                return [*statements, statement]
            if not isinstance(statement, ast.If) or not exits_of([statement]):
                statements.append(statement)
                continue
            num_paths = _num_paths([statement])
            if num_paths > 1 and _is_long(rest):
                # Copies of the rest in both branches would grow exponentially.
                rest = [*self.through(statement), *rest]
                continue
            for name in ("body", "orelse"):
                branch: list[ast.stmt] = getattr(statement, name)
                if _num_paths(branch):
                    branch = [*branch, *(deepcopy(rest) if num_paths > 1 else rest)]
                setattr(statement, name, self.settled(branch, returns=returns))
            if returns:
                setattr(statement, TAIL, True)
            return [*statements, statement]
        if returns and not (statements and _always_leaves(statements[-1])):
            last = statements[-1] if statements else ast.Pass(lineno=1, col_offset=0)
            statements.append(at_line_of(ast.Return(), last))
        return statements


# --- analysis of exits ----------------------------------------------------------------


def _blocks_of(statement: ast.stmt) -> list[tuple[ast.AST, str]]:
    """Return the blocks of a statement: the node that has each, and its field."""
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
    """Return the exits of a block, without those of inner loops and functions."""
    exits: list[ast.stmt] = []
    for statement in block:
        if isinstance(statement, _EXITS):
            exits.append(statement)
        elif not isinstance(statement, SCOPES):
            for part, name in _blocks_of(statement):
                inner = exits_of(getattr(part, name))
                if isinstance(statement, LOOPS) and name == "body":
                    inner = [e for e in inner if isinstance(e, ast.Return)]
                exits += inner
    return exits


def _always_leaves(statement: ast.stmt) -> bool:
    if isinstance(statement, (*_EXITS, ast.Raise)):
        return True
    return isinstance(statement, ast.If) and not _num_paths([statement])


def _num_paths(block: Sequence[ast.stmt]) -> int:
    """Return the number of paths through the `if`s of a block that reach its end; 2
    means two or more."""
    count = 1
    for statement in block:
        if isinstance(statement, (*_EXITS, ast.Raise)):
            return 0
        if isinstance(statement, ast.If) and exits_of([statement]):
            count *= _num_paths(statement.body) + _num_paths(statement.orelse)
    return min(count, 2)


def _is_true(test: ast.expr) -> bool:
    return isinstance(test, ast.Constant) and bool(test.value)


def _is_long(block: Sequence[ast.stmt]) -> bool:
    simple = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Pass, *_EXITS)
    return len(block) > 3 or not all(isinstance(s, simple) for s in block)


# --- flags ----------------------------------------------------------------------------


def _replaced(
    block: Sequence[ast.stmt], by: Mapping[type[ast.stmt], _Replacement]
) -> list[ast.stmt]:
    """Return a block with its exits, also those in `if`s, replaced.

    Args:
        by: Kind of exit -> the function that makes the statements for it.
    """
    statements: list[ast.stmt] = []
    for statement in block:
        if make := by.get(type(statement)):
            statements += make(statement)
            continue
        if isinstance(statement, ast.If):
            statement.body = _replaced(statement.body, by)
            statement.orelse = _replaced(statement.orelse, by)
        statements.append(statement)
    return statements or parsed("pass", block[0]) if block else []


def _return(statement: ast.stmt) -> list[ast.stmt]:
    assert isinstance(statement, ast.Return)
    value = statement.value or ast.Constant(None)
    stored = ast.Assign([ast.Name(RESULT, ast.Store())], value)
    # The value is evaluated before the flag is set, as it may raise.
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
    """Return a block with statements inserted before each `break` and `continue`."""

    def first(statement: ast.stmt) -> list[ast.stmt]:
        return [*deepcopy(before), statement]

    return _replaced(block, {ast.Break: first, ast.Continue: first})


def _if(test: str, block: list[ast.stmt], where: ast.stmt) -> ast.If:
    [statement] = parsed(f"if {test}:\n    pass", where)
    assert isinstance(statement, ast.If)
    statement.body = block
    return statement


# --- positions ------------------------------------------------------------------------


def at_line_of(node: _Node, where: ast.stmt | ast.expr) -> _Node:
    """Place a generated node, and its generated descendants, on the line of another."""
    for part in ast.walk(node):
        if "lineno" in part._attributes and not hasattr(part, "lineno"):
            start = {"lineno": where.lineno, "col_offset": where.col_offset}
            end = {f"end_{name}": value for name, value in start.items()}
            for name, value in {**start, **end}.items():
                setattr(part, name, value)
    return node


def unplace(node: ast.AST) -> None:
    """Delete the positions of a parsed node, which gets those of the user's code."""
    for part in ast.walk(node):
        for name in ("lineno", "end_lineno", "col_offset", "end_col_offset"):
            if hasattr(part, name):
                delattr(part, name)


def parsed(text: str, where: ast.stmt) -> list[ast.stmt]:
    """Return the statements of a text, placed on the line of another node."""
    block = ast.parse(text).body
    for statement in block:
        unplace(statement)
    return [at_line_of(statement, where) for statement in block]
