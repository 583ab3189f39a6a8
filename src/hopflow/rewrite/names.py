"""Which names a piece of code reads, assigns, and still needs later."""

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from hopflow.rewrite.exits import BROKEN, LOOPS, SCOPES, Loop

Scope: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef

AFTER: Final = "hopflow_after"
"""An attribute of an `if` or a loop: the names that are read after it."""
HEAD: Final = "hopflow_head"
"""An attribute of the same: the names that are read from its beginning on."""
CAPTURED: Final = "hopflow_captured"
"""An attribute of the same: those of them that only functions within read."""

_COMPREHENSIONS: Final = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def walk_own(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all below it, but for what is in functions and classes within."""
    yield node
    if not isinstance(node, SCOPES):
        for child in ast.iter_child_nodes(node):
            yield from walk_own(child)


def reads(*nodes: ast.AST | None) -> set[str]:
    """The names that are read, those that functions within read from around them too;
    also those that these assign there."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name):
            found |= set() if isinstance(node.ctx, ast.Store) else {node.id}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            found |= _read_by_function(node)
        elif isinstance(node, _COMPREHENSIONS):
            parts = list(ast.iter_child_nodes(node))
            first = node.generators[0].iter
            own = assigned(*(g.target for g in node.generators))
            found |= reads(first) | (reads(*parts) - own)
        elif node is not None:
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
            if hasattr(node, BROKEN):
                found.add(getattr(node, BROKEN))
            found |= reads(*ast.iter_child_nodes(node))
    return found


def _read_by_function(node: Scope | ast.Lambda) -> set[str]:
    args = node.args
    params = params_of(node)
    before = reads(*args.defaults, *args.kw_defaults)
    if isinstance(node, ast.Lambda):
        return before | (reads(node.body) - params)
    outer = declared(node.body)
    own = params | (assigned(*node.body) - outer)
    return before | reads(*node.decorator_list) | ((reads(*node.body) | outer) - own)


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


def declared(
    block: Sequence[ast.stmt], *kinds: type[ast.Global | ast.Nonlocal]
) -> set[str]:
    """The names that are `global` or `nonlocal` in a scope; or of one of `kinds`."""
    return {
        name
        for statement in block
        for node in walk_own(statement)
        if isinstance(node, kinds or (ast.Global, ast.Nonlocal))
        for name in node.names
    }


def writers(
    block: Sequence[ast.stmt], around: Mapping[str, str], but: set[str]
) -> dict[str, str]:
    """The functions that assign a name outside of themselves when they are called, by
    their own hand or by another one's, and that name; `around` the scope, and in it.

    Args:
        but: Names that may be assigned.
    """
    functions = _functions(block)
    found = dict(around)
    for f in functions:
        found.pop(f.name, None)
        if names := _written_around(f) - but:
            found[f.name] = min(names)
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


def _written_around(function: Scope) -> set[str]:
    outer = declared(function.body)
    own = assigned(*function.body) | params_of(function)
    return (own & outer) | (written_within(function.body) - (own - outer))


def written_within(block: Sequence[ast.stmt]) -> set[str]:
    """The names of a scope, or around it, that functions defined in it assign."""
    return set().union(*map(_written_around, _functions(block)))


def params_of(function: Scope | ast.Lambda) -> set[str]:
    args = function.args
    named = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    return {a.arg for a in named if a is not None}


def _functions(block: Sequence[ast.stmt]) -> list[Scope]:
    found = [n for statement in block for n in walk_own(statement)]
    return [n for n in found if isinstance(n, Scope)]


def mark_live(function: Scope) -> None:
    """Note at each `if` and each loop which names are needed after it and from it on.

    What functions within read may be read whenever they are called.
    """
    own = [n for statement in function.body for n in walk_own(statement)]
    at_once = {id(argument) for n in own for argument in _consumed(n)}
    inner = [
        name
        for n in own
        if isinstance(n, (*SCOPES, ast.GeneratorExp)) and id(n) not in at_once
        for name in reads(n)
    ]
    # Those that are not its own may be read by anyone when it has ended.
    live = _Live(set(inner), declared(function.body))
    live.block(function.body, live.outer, live.outer)


def _consumed(node: ast.AST) -> list[ast.expr]:
    """The arguments of a call that it runs over and does not keep."""
    match node:
        case ast.Call(ast.Name(name), arguments) if name in _CONSUMERS:
            return arguments
    return []


_CONSUMERS: Final = frozenset(
    "all any dict frozenset list max min set sorted sum tuple".split()
)


class _Live:
    """Which names are live where.

    always   those that functions within read
    outer    those of around the function, which are read after it
    raising  those that are read if an error leaves the block at hand
    """

    def __init__(self, always: set[str], outer: set[str]) -> None:
        self.always = always
        self.outer = outer
        self.raising: set[str] = set()

    def block(
        self,
        block: Sequence[ast.stmt],
        after: set[str],
        raising: Iterable[str] = (),
    ) -> set[str]:
        """What is live before a block."""
        around, self.raising = self.raising, self.raising.union(raising)
        for statement in reversed(block):
            after = self.statement(statement, after) | self.raising
        self.raising = around
        return after

    def statement(self, node: ast.stmt, after: set[str]) -> set[str]:
        if isinstance(node, ast.If):
            before = self.block(node.body, after) | self.block(node.orelse, after)
            before = (before - _surely_assigned(node.test)) | reads(node.test)
        elif isinstance(node, LOOPS):
            before = self.loop(node, after)
        elif isinstance(node, ast.With | ast.AsyncWith):  # it may catch an error
            before = self.block(node.body, after, after)
            before = (before - assigned(*node.items)) | reads(*node.items)
        elif isinstance(node, ast.Try | ast.TryStar):
            before = self.trying(node, after)
        elif isinstance(node, ast.Match):
            cases = (self.block(case.body, after) for case in node.cases)
            guards = (reads(case.pattern, case.guard) for case in node.cases)
            before = after.union(reads(node.subject), *cases, *guards)
        elif isinstance(node, ast.Return | ast.Raise):
            before = reads(node) | self.outer
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            before = (after - {node.name}) | reads(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.Import | ast.ImportFrom):
            has_value = getattr(node, "value", node) is not None
            before = (after - assigned(node) if has_value else after) | reads(node)
        else:
            before = (after - _surely_assigned(node)) | reads(node)
        if isinstance(node, (ast.If, *LOOPS)):
            self.note(node, after | self.raising, before | self.raising)
        return before

    def trying(self, node: ast.Try | ast.TryStar, after: set[str]) -> set[str]:
        final = self.block(node.finalbody, after)
        caught = set(final)
        for handler in node.handlers:
            inside = self.block(handler.body, final, final) - {handler.name}
            caught |= inside | reads(handler.type)
        done = self.block(node.orelse, final, final)
        return self.block(node.body, done, caught)

    def loop(self, node: Loop, after: set[str]) -> set[str]:
        if isinstance(node, ast.While):
            own, before = reads(node.test), set[str]()
            killed, targets = _surely_assigned(node.test), set[str]()
        else:
            own, before = set(), reads(node.iter)
            killed, targets = set(), assigned(node.target)
        own |= {getattr(node, BROKEN)} if hasattr(node, BROKEN) else set()
        head = own | (after - killed)
        while True:
            body = self.block(node.body, head | after)
            more = head | own | (body - targets - killed)
            if more == head:
                return head | before
            head = more

    def note(self, node: ast.stmt, after: set[str], head: set[str]) -> None:
        setattr(node, AFTER, after | self.always)
        setattr(node, HEAD, head | after | self.always)
        setattr(node, CAPTURED, self.always - head - after)


def _surely_assigned(node: ast.AST) -> set[str]:
    """The names that an expression assigns whenever it is evaluated, by `:=`."""
    found: set[str] = set()
    parts: list[ast.AST] = list(ast.iter_child_nodes(node))
    match node:
        case ast.NamedExpr(ast.Name(name)):
            found.add(name)
        case ast.BoolOp(_, [first, *_]):
            parts = [first]
        case ast.IfExp(test):
            parts = [test]
        case ast.Compare(left, _, [first, *_]):
            parts = [left, first]
        case ast.Lambda():
            parts = []
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            parts = [node.generators[0].iter]
    return found.union(*map(_surely_assigned, parts))
