"""Analysis of names: which names code reads and assigns, and their liveness."""

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from hopflow.rewrite.exits import BROKEN, LOOPS, SCOPES, Loop

Scope: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef

AFTER: Final = "hopflow_after"
"""An attribute of an `if` or a loop node: the names that are live after it."""
HEAD: Final = "hopflow_head"
"""An attribute of the same nodes: the names that are live at its start."""
CAPTURED: Final = "hopflow_captured"
"""An attribute of the same nodes: the names that only inner functions read."""

_COMPREHENSIONS: Final = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def walk_scope(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and its descendants in the same scope: not those of inner functions
    and classes."""
    yield node
    if not isinstance(node, SCOPES):
        for child in ast.iter_child_nodes(node):
            yield from walk_scope(child)


def reads(*nodes: ast.AST | None) -> set[str]:
    """Return the names that nodes read, including free variables of inner functions
    that these read or assign."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name):
            names |= set() if isinstance(node.ctx, ast.Store) else {node.id}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            names |= _read_by_function(node)
        elif isinstance(node, _COMPREHENSIONS):
            parts = list(ast.iter_child_nodes(node))
            first = node.generators[0].iter
            targets = assigned(*(g.target for g in node.generators))
            names |= reads(first) | (reads(*parts) - targets)
        elif node is not None:
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
            if hasattr(node, BROKEN):
                names.add(getattr(node, BROKEN))
            names |= reads(*ast.iter_child_nodes(node))
    return names


def _read_by_function(node: Scope | ast.Lambda) -> set[str]:
    args = node.args
    params = params_of(node)
    defaults = reads(*args.defaults, *args.kw_defaults)
    if isinstance(node, ast.Lambda):
        return defaults | (reads(node.body) - params)
    outer = declared(node.body)
    local_names = params | (assigned(*node.body) - outer)
    return (
        defaults
        | reads(*node.decorator_list)
        | ((reads(*node.body) | outer) - local_names)
    )


def assigned(*nodes: ast.AST) -> set[str]:
    """Return the names that nodes assign in their scope."""
    names: set[str] = set()
    for node in nodes:
        _collect(node, names, names)
    return names


def updated(*nodes: ast.AST) -> set[str]:
    """Return the names that are only updated, as by `x += y`, in place for tensors."""
    names: set[str] = set()
    updates: set[str] = set()
    for node in nodes:
        _collect(node, names, updates)
    return updates - names


def _collect(node: ast.AST, names: set[str], updates: set[str]) -> None:
    """Add the names that a node assigns, and those that it updates, to the sets."""
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        updates.add(node.target.id)
        _collect(node.value, names, updates)
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        names.add(node.name)
        return
    if isinstance(node, ast.Lambda):
        return
    if isinstance(node, _COMPREHENSIONS):  # targets are local; `:=` is not
        inner = (n for n in ast.walk(node) if isinstance(n, ast.NamedExpr))
        names.update(n.target.id for n in inner)
        return
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
        names.add(node.id)
    elif (
        isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name
    ):
        names.add(node.name)
    elif isinstance(node, ast.MatchMapping) and node.rest:
        names.add(node.rest)
    elif isinstance(node, ast.alias):
        names.add((node.asname or node.name).split(".")[0])
    for child in ast.iter_child_nodes(node):
        _collect(child, names, updates)


def declared(
    block: Sequence[ast.stmt], *kinds: type[ast.Global | ast.Nonlocal]
) -> set[str]:
    """Return the names declared in a scope as `global` or `nonlocal`, or as `kinds`."""
    return {
        name
        for statement in block
        for node in walk_scope(statement)
        if isinstance(node, kinds or (ast.Global, ast.Nonlocal))
        for name in node.names
    }


def writers(
    block: Sequence[ast.stmt], around: Mapping[str, str], but: set[str]
) -> dict[str, str]:
    """Return the functions whose calls assign a name outside of them, directly or by
    another call: function in the block or in `around` -> such a name.

    Args:
        around: The same for functions outside the block.
        but: Names to ignore.
    """
    functions = _functions(block)
    written = dict(around)
    for f in functions:
        written.pop(f.name, None)
        if names := _assigned_outside(f) - but:
            written[f.name] = min(names)
    callees = {f.name: reads(*f.body) for f in functions} | _names_of_aliases(block)
    for _ in callees:  # to the fixed point
        for name, read in callees.items():
            for called in sorted(read & written.keys()):
                written.setdefault(name, written[called])
    return written


def _names_of_aliases(block: Sequence[ast.stmt]) -> dict[str, set[str]]:
    """Return the names that lambdas and aliases of functions read, by their name."""
    names: dict[str, set[str]] = {}
    for node in (n for statement in block for n in walk_scope(statement)):
        match node:
            case ast.Assign(
                [ast.Name(name)], ast.Lambda() | ast.Name() as value
            ) | ast.AnnAssign(ast.Name(name), _, ast.Lambda() | ast.Name() as value):
                names[name] = reads(value)
    return names


def _assigned_outside(function: Scope) -> set[str]:
    """Return the names outside of a function that it or inner functions assign."""
    outer = declared(function.body)
    assigned_names = assigned(*function.body) | params_of(function)
    return (assigned_names & outer) | (
        assigned_by_inner(function.body) - (assigned_names - outer)
    )


def assigned_by_inner(block: Sequence[ast.stmt]) -> set[str]:
    """Return the names of a scope, or outside it, that inner functions assign."""
    return set().union(*map(_assigned_outside, _functions(block)))


def params_of(function: Scope | ast.Lambda) -> set[str]:
    """Return the names of the parameters."""
    args = function.args
    named = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    return {a.arg for a in named if a is not None}


def _functions(block: Sequence[ast.stmt]) -> list[Scope]:
    nodes = [n for statement in block for n in walk_scope(statement)]
    return [n for n in nodes if isinstance(n, Scope)]


def mark_live(function: Scope) -> None:
    """Store the live names in attributes of each `if` and loop: see `AFTER`, `HEAD`.

    Names that inner functions read are always live, as these may be called anytime.
    """
    nodes = [n for statement in function.body for n in walk_scope(statement)]
    immediate = {id(argument) for n in nodes for argument in _consumed(n)}
    inner = [
        name
        for n in nodes
        if isinstance(n, (*SCOPES, ast.GeneratorExp)) and id(n) not in immediate
        for name in reads(n)
    ]
    # Globals and nonlocals are live at the end.
    live = _Live(set(inner), declared(function.body))
    live.block(function.body, live.outer, live.outer)


def _consumed(node: ast.AST) -> list[ast.expr]:
    """Return the arguments of a call that consumes an iterator immediately."""
    match node:
        case ast.Call(ast.Name(name), arguments) if name in _CONSUMERS:
            return arguments
    return []


_CONSUMERS: Final = frozenset(
    "all any dict frozenset list max min set sorted sum tuple".split()
)


class _Live:
    """Liveness analysis of a function, backwards over its statements.

    always   the names that inner functions read
    outer    globals and nonlocals, which are live after the function
    raising  the names that are live if the current block raises an error
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
        """Return the names that are live before a block."""
        outer_raising, self.raising = self.raising, self.raising.union(raising)
        for statement in reversed(block):
            after = self.statement(statement, after) | self.raising
        self.raising = outer_raising
        return after

    def statement(self, node: ast.stmt, after: set[str]) -> set[str]:
        """Return the names that are live before a statement."""
        if isinstance(node, ast.If):
            before = self.block(node.body, after) | self.block(node.orelse, after)
            before = (before - _surely_assigned(node.test)) | reads(node.test)
        elif isinstance(node, LOOPS):
            before = self.loop(node, after)
        elif isinstance(node, ast.With | ast.AsyncWith):  # it may suppress an error
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
        """Return the names that are live before a `try`."""
        final = self.block(node.finalbody, after)
        caught = set(final)
        for handler in node.handlers:
            handled = self.block(handler.body, final, final) - {handler.name}
            caught |= handled | reads(handler.type)
        no_error = self.block(node.orelse, final, final)
        return self.block(node.body, no_error, caught)

    def loop(self, node: Loop, after: set[str]) -> set[str]:
        """Return the names that are live before a loop, by a fixed point."""
        if isinstance(node, ast.While):
            tested, before = reads(node.test), set[str]()
            killed, targets = _surely_assigned(node.test), set[str]()
        else:
            tested, before = set(), reads(node.iter)
            killed, targets = set(), assigned(node.target)
        tested |= {getattr(node, BROKEN)} if hasattr(node, BROKEN) else set()
        head = tested | (after - killed)
        while True:
            body = self.block(node.body, head | after)
            new_head = head | tested | (body - targets - killed)
            if new_head == head:
                return head | before
            head = new_head

    def note(self, node: ast.stmt, after: set[str], head: set[str]) -> None:
        """Store the live names in the attributes of a node."""
        setattr(node, AFTER, after | self.always)
        setattr(node, HEAD, head | after | self.always)
        setattr(node, CAPTURED, self.always - head - after)


def _surely_assigned(node: ast.AST) -> set[str]:
    """Return the names that an expression assigns by `:=` in each evaluation."""
    names: set[str] = set()
    parts: list[ast.AST] = list(ast.iter_child_nodes(node))
    match node:
        case ast.NamedExpr(ast.Name(name)):
            names.add(name)
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
    return names.union(*map(_surely_assigned, parts))
