"""Which names a piece of code reads, assigns, and still needs later."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from hopflow.rewrite.exits import BROKEN, SCOPES, Loop

__all__ = [
    "AFTER",
    "HEAD",
    "assigned",
    "declared",
    "mark_live",
    "reads",
    "updated",
    "walk_own",
    "writers",
]

AFTER: Final = "hopflow_after"
"""An attribute of an `if` or a loop: the names that are read after it."""
HEAD: Final = "hopflow_head"
"""An attribute of the same: the names that are read from its beginning on."""

_COMPREHENSIONS: Final = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def walk_own(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all below it, but for what is in functions and classes within."""
    yield node
    if not isinstance(node, SCOPES):
        for child in ast.iter_child_nodes(node):
            yield from walk_own(child)


def reads(*nodes: ast.AST | None) -> set[str]:
    """The names that are read, those read by functions within too."""
    return {
        n.id
        for node in nodes
        if node is not None
        for n in ast.walk(node)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
    }


def assigned(*nodes: ast.AST) -> set[str]:
    """The names that are assigned in the scope the nodes stand in."""
    found: set[str] = set()
    for node in nodes:
        _collect(node, found, found)
    return found


def updated(*nodes: ast.AST) -> set[str]:
    """Those that are only updated, as by `x += y`: a tensor stays the same one."""
    found: set[str] = set()
    updates: set[str] = set()
    for node in nodes:
        _collect(node, found, updates)
    return updates - found


def _collect(node: ast.AST, found: set[str], updates: set[str]) -> None:
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        updates.add(node.target.id)
        _collect(node.value, found, updates)
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        found.add(node.name)
        return
    if isinstance(node, ast.Lambda):
        return
    if isinstance(node, _COMPREHENSIONS):  # its own names; `:=` assigns around it
        inner = (n for n in ast.walk(node) if isinstance(n, ast.NamedExpr))
        found.update(n.target.id for n in inner)
        return
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
        found.add(node.id)
    elif (
        isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name
    ):
        found.add(node.name)
    elif isinstance(node, ast.MatchMapping) and node.rest:
        found.add(node.rest)
    elif isinstance(node, ast.alias):
        found.add((node.asname or node.name).split(".")[0])
    for child in ast.iter_child_nodes(node):
        _collect(child, found, updates)


def declared(block: Sequence[ast.stmt]) -> set[str]:
    """The names that are `global` or `nonlocal` in a scope."""
    return {
        name
        for statement in block
        for node in walk_own(statement)
        if isinstance(node, ast.Global | ast.Nonlocal)
        for name in node.names
    }


def writers(block: Sequence[ast.stmt], around: Mapping[str, str]) -> dict[str, str]:
    """The functions that assign a name outside of themselves when they are called, by
    their own hand or by another one's, and that name; `around` the scope, and in it."""
    functions = _functions(block)
    found = dict(around)
    found |= {f.name: min(names) for f in functions if (names := _written_around(f))}
    named = {f.name: reads(*f.body) for f in functions} | _names_of_others(block)
    for _ in named:  # as far as they call each other
        for name, read in named.items():
            for called in sorted(read & found.keys()):
                found.setdefault(name, found[called])
    return found


def _names_of_others(block: Sequence[ast.stmt]) -> dict[str, set[str]]:
    """What lambdas and second names of functions read, by the name each is given."""
    found: dict[str, set[str]] = {}
    for node in (n for statement in block for n in walk_own(statement)):
        match node:
            case ast.Assign(
                [ast.Name(name)], ast.Lambda() | ast.Name() as value
            ) | ast.AnnAssign(ast.Name(name), _, ast.Lambda() | ast.Name() as value):
                found[name] = reads(value)
    return found


def _written_around(function: ast.FunctionDef) -> set[str]:
    outer = declared(function.body)
    own = assigned(*function.body)
    within = (_written_around(f) for f in _functions(function.body))
    return (own & outer) | (set().union(*within) - (own - outer))


def _functions(block: Sequence[ast.stmt]) -> list[ast.FunctionDef]:
    found = [n for statement in block for n in walk_own(statement)]
    return [n for n in found if isinstance(n, ast.FunctionDef)]


def mark_live(function: ast.FunctionDef) -> None:
    """Note at each `if` and each loop which names are needed after it and from it on.

    What functions within read may be read whenever they are called: it is always live.
    """
    inner = [
        name
        for statement in function.body
        for n in walk_own(statement)
        if isinstance(n, SCOPES)
        for name in _free(n)
    ]
    _Live(set(inner)).block(function.body, set())


def _free(scope: ast.AST) -> set[str]:
    """The names that a function or class within reads from around it."""
    own = {n.arg for n in ast.walk(scope) if isinstance(n, ast.arg)}
    body = getattr(scope, "body", [])
    if isinstance(body, list):
        own |= assigned(*body) - declared(body)
    return reads(scope) - own


class _Live:
    def __init__(self, always: set[str]) -> None:
        self.always = always

    def block(self, block: Sequence[ast.stmt], after: set[str]) -> set[str]:
        """What is live before a block."""
        for statement in reversed(block):
            after = self.statement(statement, after)
        return after

    def statement(self, node: ast.stmt, after: set[str]) -> set[str]:
        if isinstance(node, ast.If):
            before = self.block(node.body, after) | self.block(node.orelse, after)
            before |= reads(node.test)
        elif isinstance(node, ast.While | ast.For):
            before = self.loop(node, after)
        elif isinstance(node, ast.With):
            before = self.block(node.body, after) - assigned(*node.items)
            before |= reads(*node.items)
        elif isinstance(node, ast.Return):
            before = reads(node.value)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            before = (after - {node.name}) | reads(node)
        elif isinstance(node, ast.AugAssign):
            before = after | reads(node) | assigned(node.target)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.Import | ast.ImportFrom):
            has_value = getattr(node, "value", node) is not None
            before = (after - assigned(node) if has_value else after) | reads(node)
        else:  # it may leave at any point, or assign nothing
            for child in walk_own(node):
                if (
                    isinstance(child, ast.If | ast.While | ast.For)
                    and child is not node
                ):
                    self.note(child, after | reads(node), after | reads(node))
            before = after | reads(node)
        if isinstance(node, ast.If | ast.While | ast.For):
            self.note(node, after, before)
        return before

    def loop(self, node: Loop, after: set[str]) -> set[str]:
        own = reads(node.test if isinstance(node, ast.While) else None)
        own |= {getattr(node, BROKEN)} if hasattr(node, BROKEN) else set()
        targets = assigned(node.target) if isinstance(node, ast.For) else set()
        head = own | after | reads(*node.orelse)
        while True:
            more = head | own | (self.block(node.body, head) - targets)
            if more == head:
                break
            head = more
        self.block(node.orelse, after)
        return head | reads(node.iter if isinstance(node, ast.For) else None)

    def note(self, node: ast.stmt, after: set[str], head: set[str]) -> None:
        setattr(node, AFTER, after | self.always)
        setattr(node, HEAD, head | self.always)
