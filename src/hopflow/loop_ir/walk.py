"""Traversals of expressions and statements."""

from collections import Counter, defaultdict
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Sequence,
)
from typing import Final, NamedTuple

from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Var, rewrite
from hopflow.loop_ir.program import (
    Accumulate,
    Allocate,
    Assign,
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
from hopflow.symbolic.scalars import terms_of


def nodes(*roots: Expr) -> list[Expr]:
    """Return every node of `roots` once, in topological order: operands first."""
    if len(roots) == 1:  # mostly a leaf, or one operation
        [root] = roots
        for operand in root.args:
            if operand.args:
                break
        else:
            return [*dict.fromkeys(root.args), root]
    order: dict[Expr, None] = {}
    for root in roots:
        if not root.args:
            order[root] = None
            continue
        if root in order:
            continue
        pending = [root]
        while pending:  # no recursion: a chain may be thousands of nodes deep
            node = pending[-1]
            for operand in node.args:
                if operand not in order:
                    if operand.args:
                        pending.append(operand)
                        break
                    order[operand] = None  # a leaf, as most are
            else:
                order[node] = None
                pending.pop()
    return list(order)


def depends_on(value: Expr, var: Var) -> bool:
    """Return whether an expression reads a variable."""
    return any(node.op == "var" and node.attr is var for node in nodes(value))


def names(value: Expr, variables: Collection[Var]) -> bool:
    """Return whether an expression reads one of some variables."""
    return any(node.op == "var" and node.attr in variables for node in nodes(value))


def dependent(body: Iterable[Stmt], var: Var) -> set[Var]:
    """Return the variables whose values some statements compute of `var`, and itself.

    What is assigned in one case only does not count as computed of the test.
    """
    readers = defaultdict[Var, list[Var]](list)
    for s in body:
        if isinstance(s, Let | Declare | Assign | Accumulate):
            for node in nodes(s.value):
                if node.op == "var":
                    readers[node.attr].append(s.var)
    found, pending = {var}, [var]
    while pending:
        new = set(readers[pending.pop()]) - found
        found |= new
        pending += new
    return found


def step_of(position: Expr, var: Var) -> int | None:
    """Return by how much a position moves with a variable, if that is a constant and
    the position is a sum; None: it is something else."""
    steps: dict[Expr, int | None] = {}
    for node in nodes(position):
        parts = [steps[x] for x in node.args]
        x, y = (*parts, None, None)[:2]
        if node.op == "var":
            steps[node] = int(node.attr is var)
        elif all(part == 0 for part in parts):
            steps[node] = 0
        elif node.op in ("add", "sub") and x is not None and y is not None:
            steps[node] = x + y if node.op == "add" else x - y
        elif node.op == "mul" and node.args[1].is_const and x is not None:
            steps[node] = x * node.args[1].attr
        else:
            steps[node] = None
    return steps[position]


def base_and_constant(position: Expr) -> tuple[Expr, int]:
    """Return a position as a sum of what is no constant and of a constant."""
    if position.is_const:
        return e.index(0), position.attr
    if position.op == "add" and position.args[1].is_const:
        return position.args[0], position.args[1].attr
    return position, 0


def attribute(node: Expr) -> Hashable:
    """Return a key of a node's attribute, equal for structurally equal nodes. 0.0 is
    not -0.0, and all NaNs are equal; sizes are equal if their terms are, whatever facts
    are known about them."""
    if node.op == "const":
        value: Hashable = node.attr
        return node.attr.hex() if isinstance(value, float) else value
    return terms_of(node.attr) if node.op == "size" else node.attr


class Interned:
    """Hash consing: one node for all nodes of the same structure."""

    def __init__(self) -> None:
        self._nodes: dict[Hashable, Expr] = {}
        self._roots: dict[Expr, Expr] = {}

    def node(self, node: Expr) -> Expr:
        """Return the unique node equal to `node`, whose operands are unique already."""
        op = node.op
        if op == "var":
            return node
        attr = attribute(node) if op == "const" or op == "size" else node.attr
        return self._nodes.setdefault((op, node.dtype, attr, node.args), node)

    def of(self, root: Expr) -> Expr:
        """Return an expression of unique nodes."""
        if root not in self._roots:
            values: dict[Expr, Expr] = {}
            for node in nodes(root):
                args = tuple([values[a] for a in node.args])
                values[node] = self.node(e.with_args(node, args))
            self._roots[root] = values[root]
        return self._roots[root]


def same(x: Expr, y: Expr) -> bool:
    """Return whether two expressions are structurally equal."""
    compared: set[tuple[Expr, Expr]] = set()
    pending = [(x, y)]
    while pending:
        pair = pending.pop()
        a, b = pair
        if a is b or pair in compared:
            continue
        if a.op != b.op or a.dtype is not b.dtype or len(a.args) != len(b.args):
            return False
        if a.attr is not b.attr and attribute(a) != attribute(b):
            return False
        compared.add(pair)
        pending += zip(a.args, b.args, strict=True)
    return True


def same_shape(x: Sequence[Expr], y: Sequence[Expr]) -> bool:
    """Return whether two shapes are structurally equal."""
    return len(x) == len(y) and all(map(same, x, y))


class MergedAxis(NamedTuple):
    """Adjacent axes of an array that share one position, from `first` to `last`."""

    position: Expr
    extent: Expr
    first: int
    last: int


def merged_axes(at: Sequence[Expr], shape: Sequence[Expr]) -> list[MergedAxis]:
    """Return the index into a dense array with the axes at `q / n` and `q % n`, as in
    reads of a reshaped array, merged into one, and without axes of size 1."""
    axes: list[MergedAxis] = []
    for axis, (x, extent) in enumerate(zip(at, shape, strict=False)):
        if extent.is_const and extent.attr == 1:
            continue
        merged = MergedAxis(x, extent, axis, axis)
        if axes and x.op == "rem" and axes[-1].position.op == "div":
            (p, n), (q, m) = axes[-1].position.args, x.args
            if same(p, q) and same(n, m) and same(n, extent):
                before = axes.pop()
                whole = e.mul(before.extent, extent)
                merged = MergedAxis(p, whole, before.first, axis)
        axes.append(merged)
    return axes


def expressions(statement: Stmt) -> tuple[Expr, ...]:
    """Return the expressions of `statement` itself, not of its bodies."""
    match statement:
        case Let() | Declare() | Assign() | Accumulate():
            return (statement.value,)
        case Store():
            return (*statement.indices, statement.value)
        case For():
            return (statement.extent,)
        case While() | If():
            return (statement.test,)
        case Call():
            return tuple(
                e
                for arg in statement.args
                for e in (arg.expressions if isinstance(arg, Ref) else (arg,))
            )
        case HostCall():
            return tuple(i for ref in statement.refs for i in ref.expressions)
        case Tick():
            return (statement.done, statement.total)
        case Invoke():
            placed = (i for ref in statement.refs for i in ref.expressions)
            return (*statement.sizes, *placed)
        case Trap():
            return (statement.test, *statement.values)
        case Allocate():
            return statement.buffer.shape
        case _:
            return ()


def bodies(statement: Stmt) -> tuple[list[Stmt], ...]:
    """Return the bodies of `statement`, in the order of their text."""
    match statement:
        case For():
            return (statement.body,)
        case While():
            return (statement.head, statement.body)
        case If():
            return (statement.then, statement.else_)
        case _:
            return ()


_WITH_BODIES: Final = (For, While, If)


def statements(body: Sequence[Stmt]) -> Iterator[Stmt]:
    """Yield every statement in `body`, at any depth, each before those inside it."""
    pending = [*reversed(body)]
    while pending:  # recursive generators would pass each statement up every level
        statement = pending.pop()
        yield statement
        if isinstance(statement, _WITH_BODIES):  # few are
            for inner in reversed(bodies(statement)):
                pending += reversed(inner)


def perfect_nest(loop: For) -> list[For]:
    """Return a nest of independent loops, each of which is all of the body of the one
    before."""
    nest = [loop]
    while len(nest[-1].body) == 1:
        inner = nest[-1].body[0]
        if not (isinstance(inner, For) and inner.independent):
            break
        nest.append(inner)
    return nest


def is_order_free(statement: Stmt) -> bool:
    """Return whether a statement is straight-line code, and the order of the iterations
    of an independent loop around it changes no bit."""
    if isinstance(statement, Accumulate):
        is_exact = statement.combine not in ("add", "mul")
        return is_exact or not statement.var.dtype.is_float
    return isinstance(statement, Let | Store)


def functions(program: Program) -> dict[Program, None]:
    """Return the functions of a program, each after those that it calls."""
    result: dict[Program, None] = {}

    def visit(caller: Program) -> None:
        for function in caller.functions:
            if function not in result:
                visit(function)
                result[function] = None

    visit(program)
    return result


def allocated(body: Sequence[Stmt]) -> dict[Buffer, None]:
    """Return the buffers that `body` allocates while it runs."""
    return {s.buffer: None for s in statements(body) if isinstance(s, Allocate)}


def loaded(statement: Stmt) -> Iterator[Expr]:
    """Yield the "load" nodes in the expressions of `statement` itself."""
    return (node for node in nodes(*expressions(statement)) if node.op == "load")


def accessed(statement: Stmt) -> Iterator[tuple[Buffer, e.Index]]:
    """Yield the elements that `statement` itself loads or stores."""
    for node in loaded(statement):
        yield node.attr, e.index_of(node)
    if isinstance(statement, Store):
        yield statement.buffer, statement.indices


def buffers(statement: Stmt) -> Iterator[Buffer]:
    """Yield the buffers that `statement` itself reads or writes."""
    yield from (node.attr for node in loaded(statement))
    yield from named(statement)


def named(statement: Stmt) -> Iterator[Buffer]:
    """Yield the buffers that `statement` itself uses other than by loads."""
    match statement:
        case Store() | Allocate():
            yield statement.buffer
        case Copy():
            yield from (statement.target, statement.source)
        case Swap():
            yield from (statement.a, statement.b)
        case Call():
            yield from (arg.buffer for arg in statement.args if isinstance(arg, Ref))
        case HostCall() | Invoke():
            yield from (ref.buffer for ref in statement.refs)


def uses(body: Sequence[Stmt]) -> Counter[Buffer]:
    """Count the uses of each buffer in the statements of `body`."""
    return Counter(b for s in statements(body) for b in buffers(s))


def replace(statement: Stmt, leaf: Callable[[Expr], Expr | None]) -> None:
    """Rewrite the expressions of `statement` itself, in place; see `expr.rewrite`."""

    def new(value: Expr) -> Expr:
        return rewrite(value, leaf)

    def moved(ref: Ref) -> Ref:
        rows = None if ref.rows is None else new(ref.rows)
        return Ref(ref.buffer, tuple(map(new, ref.at)), rows)

    match statement:
        case Let() | Declare() | Assign() | Accumulate():
            statement.value = new(statement.value)
        case Store():
            statement.indices = tuple(map(new, statement.indices))
            statement.value = new(statement.value)
        case For():
            statement.extent = new(statement.extent)
        case While() | If():
            statement.test = new(statement.test)
        case Call():
            statement.args = tuple(
                moved(arg) if isinstance(arg, Ref) else new(arg)
                for arg in statement.args
            )
        case HostCall() | Invoke():
            statement.operands = tuple(map(moved, statement.operands))
            statement.results = tuple(map(moved, statement.results))
            if isinstance(statement, Invoke):
                statement.sizes = tuple(map(new, statement.sizes))
        case Tick():
            statement.done = new(statement.done)
            statement.total = new(statement.total)
        case Trap():
            statement.test = new(statement.test)
            statement.values = tuple(map(new, statement.values))
        case Allocate():
            statement.buffer.shape = tuple(map(new, statement.buffer.shape))
        case _:
            pass
