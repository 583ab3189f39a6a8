"""What the steps of a loop do for a row, with the elements of the row in variables.

    for step in 0..20:                       var kept0: u32 = s[i, 0]
        for i in 0..n vector 8 ...:          var kept1: u32 = s[i, 1]
            s[i, 0] = s[i, 0] + s[i, 1]      for step in 0..20:
            s[i, 1] = s[i, 1] ^ s[i, 0]  ->      kept0 = kept0 + kept1
                                                 kept1 = kept1 ^ kept0
                                             s[i, 0] = kept0
                                             s[i, 1] = kept1

The loops of a step are over as many rows, and a row depends only on itself. Loops over
its elements are written out. Arrays that a step writes before it reads them have no
memory any more, and where steps exchange the memory of two arrays, variables are
assigned.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Final, NamedTuple, TypeAlias, TypeGuard

from hopflow.compiler.schedule.copies import copied, substituted
from hopflow.compiler.schedule.expansion import Expansion
from hopflow.compiler.schedule.forwarding import forwarded
from hopflow.compiler.schedule.groups import body_size
from hopflow.compiler.schedule.row_costs import (
    GATHERED,
    cost_in_lanes,
    cost_in_loops,
)
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Index, Var
from hopflow.loop_ir.program import Assign, Copy, Declare, For, Let, Stmt, Store, Swap
from hopflow.loop_ir.walk import (
    accessed,
    loaded,
    names,
    nodes,
    replace,
    same,
    same_shape,
    statements,
    uses,
)

MOST: Final = 16
"""Elements of a row in variables, at most."""
LARGEST: Final = 2048
"""Instructions of a step, at most."""
TRIPS: Final = 8
"""Steps of a loop, if only the run knows their number."""

Key: TypeAlias = tuple[Buffer, tuple[int | None, ...]]
"""An element of a row: its buffer, and its index; None stands for that of the row."""
Simple: TypeAlias = Let | Store | Assign


class RowSteps(NamedTuple):
    """The steps of a row.

    steps      the loop over steps
    rows       a loop over the rows in it, whose variable `body` names
    body       what a step does for a row
    before     loads the elements that are kept in variables
    after      stores those that the steps have changed
    temporary  the buffers that the steps do not access any more
    shared     what the steps do for all rows at once, which comes before
    cost       about how many instructions the steps take for a row where they are
    """

    steps: For
    rows: For
    body: list[Stmt]
    before: list[Declare]
    after: list[Store]
    temporary: set[Buffer]
    shared: list[Stmt]
    cost: float

    def saved(self, width: int, near: Collection[Buffer]) -> float:
        """Return about how many instructions fewer the lanes of a gang take for a row.

        Args:
            width: The number of lanes.
            near: Buffers of which the elements of rows will be adjacent.
        """
        extent = self.steps.extent
        trips = extent.attr if extent.is_const else TRIPS
        of_step, once = cost_in_lanes(
            self.body, self.rows.var, self.steps.var, width, near
        )
        return float(
            (self.cost - of_step) * trips - GATHERED * (len(self.before) + once)
        )

    def inputs(self) -> dict[Buffer, int]:
        """Return the buffers of which each step reads a part of the row, and all steps
        the whole row, with the axis of the rows: what a scan iterates over."""
        read: dict[Buffer, list[Index]] = {}
        for node in (n for s in self.body for n in loaded(s)):
            indices, at = read.setdefault(node.attr, []), e.index_of(node)
            if not any(same_shape(at, other) for other in indices):
                indices.append(at)
        return {
            b: axis
            for b, indices in read.items()
            if (axis := self._passed(b, indices)) is not None
        }

    def _passed(self, buffer: Buffer, indices: Sequence[Index]) -> int | None:
        """Return the axis of the rows of a buffer, if the elements that a step reads
        are most of those of its part of the row; None: they are not."""
        step, last = e.read(self.steps.var), e.sub(self.steps.extent, e.index(1))
        rows = set.intersection(*[axes_of(self.rows.var, at) for at in indices])
        if len(rows) != 1 or buffer.strides is not None:
            return None
        [of_rows] = rows
        if not same(buffer.shape[of_rows], self.rows.extent):
            return None
        if of_rows == len(buffer.shape) - 1:  # the elements of rows are adjacent
            return None
        parts = elements = 1
        for axis, n in enumerate(buffer.shape):
            of_axis = [at[axis] for at in indices]
            if axis in rows:
                continue
            if all(same(i, step) or same(i, e.sub(last, step)) for i in of_axis):
                parts += same(n, self.steps.extent)
            elif n.is_const and all(i.is_const for i in of_axis):
                elements *= n.attr
            else:
                return None
        is_passed = parts == 2 and 2 * len(indices) >= elements
        return of_rows if is_passed else None

    def statements(self) -> list[Stmt]:
        """Return the statements for a row; the loop over steps becomes one of them."""
        self.steps.body = self.body
        return [*self.before, self.steps, *self.after]


def steps_of_a_row(steps: For, named: Counter[Buffer]) -> RowSteps | None:
    """Return what the steps of a loop do for a row; None: rows are not independent, or
    a step does something else.

    Args:
        named: How often the program names each buffer.
    """
    iteration = _iteration(steps)
    if iteration is None:
        return None
    rows, body = iteration.rows, iteration.body
    temporary = temporaries(steps, body, rows.var, named)
    copies = _exchanged(iteration, temporary)
    if copies is None:
        return None
    body += copies
    elements = _elements(body, rows.var)
    held = [key for key in elements if key[0] not in temporary]
    kept = {
        key: Var(f"{rows.var.name}_kept{number}", elements[key].dtype)
        for number, key in enumerate(held)
    }
    if not 0 < len(kept) <= MOST:
        return None
    first = {
        outer: Var(f"{var.name}_first", var.dtype)
        for outer, var in iteration.shared.items()
    }
    before = [
        Declare(var, e.read(first[outer])) for outer, var in iteration.shared.items()
    ]
    before += [Declare(var, elements[key]) for key, var in kept.items()]
    after = {
        key: Store(s.buffer, s.indices, e.read(kept[key]))
        for s in body
        if isinstance(s, Store)
        and (key := key_of(s.buffer, s.indices, rows.var)) in kept
    }
    new = [*on_variables(body, rows.var, rows.var.name, kept, temporary)]
    return RowSteps(
        steps,
        rows,
        new,
        before,
        [*after.values()],
        temporary,
        _shared_alone(steps, first),
        iteration.cost,
    )


def _shared_alone(steps: For, first: Mapping[Var, Var]) -> list[Stmt]:
    """Return what the steps do for all rows at once, as a loop of its own, which leaves
    the last values. Each block of rows computes them again, from the first ones."""
    if not first:
        return []
    step = Var(f"{steps.var.name}_alone", steps.var.dtype)
    values, body = {steps.var: e.read(step)}, list[Stmt]()
    for s in steps.body:
        if isinstance(s, Let):
            body.append(copied(s, values, "_alone"))
        elif isinstance(s, Assign):
            body.append(Assign(s.var, substituted(s.value, values)))
    alone = For(step, steps.extent, body, False, steps.binding, steps.nodes)
    return [*(Let(var, e.read(outer)) for outer, var in first.items()), alone]


# --- what a step does -----------------------------------------------------------------


class _Iteration(NamedTuple):
    """What a step does for a row.

    rows       the first loop over rows of the step
    body       straight-line code, for the row of that loop
    shared     the variables that are the same for all rows and that the step changes,
               each with one for the row
    exchanged  the arrays whose memory the step exchanges in the end
    cost       about how many instructions it takes in the loops of the step
    """

    rows: For
    body: list[Simple]
    shared: dict[Var, Var]
    exchanged: list[Swap]
    cost: float


def _iteration(steps: For) -> _Iteration | None:
    """Return what a step does for a row, if its loops are over as many rows, and what
    is around them is the same for all rows; None: it does something else."""
    stored = {b for s in statements(steps.body) for b in written(s)}
    if any(node.op == "load" and node.attr in stored for node in nodes(steps.extent)):
        return None
    rows = next((_per_row(s)[0] for s in steps.body if _is_over_rows(s)), None)
    if rows is None:
        return None
    extents = {steps.var: steps.extent}
    expansion = Expansion(extents)
    exchanged, cost = list[Swap](), 0.0
    shared = {
        s.var: Var(f"{s.var.name}_{rows.var.name}", s.var.dtype)
        for s in steps.body
        if isinstance(s, Assign)
    }
    expansion.values |= {var: e.read(own) for var, own in shared.items()}
    within = {steps.var, *shared}
    for s in steps.body:
        body: Sequence[Stmt] = [s]
        if _is_over_rows(s):
            loop, body, times = _per_row(s)
            if not same(loop.extent, rows.extent) or names(loop.extent, within):
                return None
            if _steps(body) * body_size(body) > LARGEST:
                return None
            expansion.values[loop.var] = e.read(rows.var)
            extents[loop.var] = loop.extent
            step = None if len(steps.body) == 1 else steps.var
            cost += times * cost_in_loops(loop, step)
        elif isinstance(s, Let | Assign):
            if any(node.attr in stored for node in loaded(s)):
                return None
            within.add(s.var)
            if isinstance(s, Assign):
                value = substituted(s.value, expansion.values)
                expansion.statements.append(Assign(shared[s.var], value))
                continue
        elif isinstance(s, Copy):
            body = _by_element(s, rows)
            cost += body_size(body)
        elif isinstance(s, Swap):
            exchanged.append(s)
            continue
        else:
            return None
        if exchanged or not body or expansion.of(body) is None:
            return None
    found = [s for s in expansion.statements if isinstance(s, Simple)]
    is_simple = len(found) == len(expansion.statements)
    if not is_simple or body_size(found) > LARGEST:
        return None

    def is_kept(buffer: Buffer, at: Index) -> bool:
        return key_of(buffer, at, rows.var) is not None  # a variable: see `_elements`

    simple: list[Simple] = forwarded(found, rows.var.name, is_kept)
    return _Iteration(rows, simple, shared, exchanged, cost)


def _is_over_rows(s: Stmt) -> TypeGuard[For]:
    return isinstance(s, For) and s.independent


def _by_element(copy: Copy, rows: For) -> list[Store]:
    """Return the copies of the elements of a row; none if there are more than a few, or
    it is not known which axis is that of the rows."""
    shape = copy.target.shape
    axes = [k for k, n in enumerate(shape) if same(n, rows.extent)]
    if len(axes) != 1 or not same_shape(shape, copy.source.shape):
        return []
    others = [n for k, n in enumerate(shape) if k not in axes]
    if not all(n.is_const for n in others) or prod(n.attr for n in others) > MOST:
        return []
    ranges = [
        [e.read(rows.var)] if k in axes else [*map(e.index, range(n.attr))]
        for k, n in enumerate(shape)
    ]
    return [Store(copy.target, at, e.load(copy.source, at)) for at in product(*ranges)]


def written(s: Stmt) -> Sequence[Buffer]:
    """Return the buffers that a statement of a step writes."""
    match s:
        case Store():
            return [s.buffer]
        case Copy():
            return [s.target]
        case Swap():
            return [s.a, s.b]
    return []


def _per_row(loop: For) -> tuple[For, Sequence[Stmt], int]:
    """Return the loop over rows of a nest, what the nest does for a row, and how often
    that loop runs: it may be in loops over the elements of a row."""
    inner = loop.body[0] if len(loop.body) == 1 else None
    if (
        not (isinstance(inner, For) and inner.independent)
        or not _has_few(loop)
        or _has_few(inner)
        or names(inner.extent, {loop.var})
    ):
        return loop, loop.body, 1
    rows, body, times = _per_row(inner)
    row = For(loop.var, loop.extent, [*body], True, loop.binding, loop.nodes)
    return rows, [row], times * loop.extent.attr


def _has_few(loop: For) -> bool:
    return bool(loop.extent.is_const and loop.extent.attr <= MOST)


def _steps(body: Sequence[Stmt]) -> int:
    """Return the most steps of a nest of loops in a body; more than allowed, if they
    are not known."""
    most = 1
    for s in body:
        if isinstance(s, For):
            extent = s.extent.attr if s.extent.is_const else LARGEST + 1
            most = max(most, extent * _steps(s.body))
    return most


def temporaries(
    steps: For, body: Sequence[Simple], row: Var | None, named: Counter[Buffer]
) -> set[Buffer]:
    """Return the buffers that only these steps name, and of which each step stores
    every element before it loads it."""
    inside, stored = uses(steps.body), set[Key | None]()
    found = {b for b, n in inside.items() if b.space == "arena" and named[b] == n}
    for s in body:
        for node in loaded(s):
            key = key_of(node.attr, e.index_of(node), row)
            if key not in stored or e.condition_of(node) is not None:
                found.discard(node.attr)
        if isinstance(s, Store):
            key = key_of(s.buffer, s.indices, row)
            stored.add(key)
            if key is None:
                found.discard(s.buffer)
    return found.intersection(key[0] for key in stored if key is not None)


def _exchanged(
    iteration: _Iteration, temporary: Collection[Buffer]
) -> list[Simple] | None:
    """Return what assigns elements in place of the exchanges of memory; None: there are
    many elements, or some are not known.

        swap a, t                let a_next0 = t[i, 0]
        swap b, t    ->          let b_next0 = a[i, 0]
                                 a[i, 0] = a_next0
                                 b[i, 0] = b_next0

    All of an array is known that a step stores before it reads it: the exchanges leave
    nothing in it that is read again.
    """
    swapped = [b for swap in iteration.exchanged for b in (swap.a, swap.b)]
    content = {b: b for b in swapped}
    for swap in iteration.exchanged:
        content[swap.a], content[swap.b] = content[swap.b], content[swap.a]
    stored = {
        key_of(s.buffer, s.indices, iteration.rows.var)
        for s in iteration.body
        if isinstance(s, Store)
    }
    reads, writes = list[Simple](), list[Simple]()
    for target, source in content.items():
        if target is source or target in temporary:
            continue
        copies = _by_element(Copy(target, source), iteration.rows)
        if not copies:
            return None
        for number, s in enumerate(copies):
            key = key_of(source, s.indices, iteration.rows.var)
            if source in temporary and key not in stored:
                return None
            name = f"{target.name}_{iteration.rows.var.name}_next{number}"
            next_ = Var(name, target.dtype)
            reads.append(Let(next_, s.value))
            writes.append(Store(target, s.indices, e.read(next_)))
    return reads + writes


# --- elements -------------------------------------------------------------------------


def _elements(body: Sequence[Simple], row: Var) -> dict[Key, Expr]:
    """Return the elements of a row, each with its load, of the buffers that a body
    stores; none if it accesses others of them, too, except to write results."""
    read = {node.attr for s in body for node in loaded(s)}
    stored = {s.buffer for s in body if isinstance(s, Store)}
    results = {b for b in stored - read if _has_results(b, body, row)}
    elements: dict[Key, Expr] = {}
    axes: dict[Buffer, int] = {}
    for s in body:
        for node in loaded(s):
            if node.attr in stored and e.condition_of(node) is not None:
                return {}
        for buffer, at in accessed(s):
            if buffer not in stored or buffer in results:
                continue
            key = key_of(buffer, at, row)
            if key is None:
                return {}
            axis = key[1].index(None)
            if axes.setdefault(buffer, axis) != axis:
                return {}
            elements.setdefault(key, e.load(buffer, at))
    return elements


def _has_results(buffer: Buffer, body: Sequence[Simple], row: Var) -> bool:
    """Return whether each step stores elements of its own, in a part of a buffer that
    belongs to the row."""
    indices = [s.indices for s in body if isinstance(s, Store) and s.buffer is buffer]
    is_fixed = all(key_of(buffer, at, row) for at in indices)
    return (
        bool(set.intersection(*[axes_of(row, at) for at in indices])) and not is_fixed
    )


def axes_of(row: Var, at: Index) -> set[int]:
    """Return the axes of which an index is that of the row."""
    return {axis for axis, i in enumerate(at) if i.op == "var" and i.attr is row}


def key_of(buffer: Buffer, at: Index, row: Var | None) -> Key | None:
    """Return the element of a row at an index; without a row, of the whole array. None:
    it is not that row's alone, or not always the same one."""
    index = tuple([int(i.attr) if i.is_const else None for i in at])
    variables = [i.attr if i.op == "var" else None for i in at if not i.is_const]
    is_known = variables == ([] if row is None else [row])
    return (buffer, index) if is_known else None


def _lies_apart(key: Key) -> bool:
    """Return whether an element of a row does not lie beside that of the next one."""
    buffer, at = key
    return any(
        not (n.is_const and n.attr == 1) for n in buffer.shape[at.index(None) + 1 :]
    )


def on_variables(
    body: Sequence[Simple],
    row: Var | None,
    name: str,
    kept: Mapping[Key, Var],
    temporary: Collection[Buffer],
) -> Iterator[Stmt]:
    """Yield the statements of an iteration with variables in place of elements; each
    store of a temporary one has a variable of its own, with `name` in its name."""
    latest = dict(kept)

    def variable(node: Expr) -> Expr | None:
        key = key_of(node.attr, e.index_of(node), row) if node.op == "load" else None
        var = None if key is None else latest.get(key)
        return None if var is None else e.read(var)

    for number, s in enumerate(body):
        replace(s, variable)
        key = key_of(s.buffer, s.indices, row) if isinstance(s, Store) else None
        if key is None or not isinstance(s, Store):
            yield s
        elif key[0] in temporary:
            latest[key] = Var(f"{key[0].name}_{name}_{number}", s.value.dtype)
            yield Let(latest[key], s.value)
        elif key in kept:
            yield Assign(kept[key], s.value)
        else:
            yield s
