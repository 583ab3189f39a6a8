"""Kernels as definitions: the functions of a kernel are called once, with the axes."""

from collections.abc import Callable, Sequence

from hopflow.compiler.kernel_program import definitions as d
from hopflow.compiler.kernel_program.definitions import Definition, Function, axes
from hopflow.graph.types import TensorType
from hopflow.loop_ir import kernels as k
from hopflow.loop_ir.expr import Expr


def definition(kernel: k.Kernel, types: Sequence[TensorType]) -> Definition:
    """Return the definition that a kernel lowers to.

    Args:
        types: The types of the kernel's results.
    """
    match kernel:
        case k.Pointwise():
            return d.Pointwise(
                (kernel.element(axes(types[0].ndim)),),
                _checks(kernel.checks),
                kernel.is_view,
            )
        case k.Reduction():
            return _reduction(kernel, types[0].ndim)
        case k.Prefix():
            element = kernel.element(axes(types[0].ndim))
            combine = _function(lambda old, new: (kernel.combine(old, new),), element)
            return d.Prefix(kernel.axis, kernel.init, combine, element, kernel.reverse)
        case k.Scatter():
            return _scatter(kernel)
        case k.Compact():
            return d.Compact(kernel.length, kernel.keep(axes(1)))
        case k.Effect():
            return d.Effect(_checks(kernel.checks))
    return kernel


def _checks(checks: Sequence[k.Check]) -> tuple[d.Check, ...]:
    return tuple([_check(check, axes(len(check.shape))) for check in checks])


def _check(check: k.Check, at: tuple[Expr, ...]) -> d.Check:
    return d.Check(check.kind, check.shape, check.holds(at), check.values(at))


def _function(combine: Callable[..., tuple[Expr, ...]], *values: Expr) -> Function:
    """Return a function of accumulators and elements, both of the types of `values`."""
    old, new = d.parameters(values, "old"), d.parameters(values, "new")
    return Function((*old, *new), combine(*old, *new))


def _reduction(kernel: k.Reduction, rank: int) -> d.Reduction:
    all_axes = axes(rank + len(kernel.space))
    element = kernel.element(all_axes[:rank], all_axes[rank:])
    combine: str | Function
    if isinstance(kernel.combine, str):
        combine = kernel.combine
    else:
        f, count = kernel.combine, len(kernel.init)
        combine = _function(lambda *xs: f(xs[:count], xs[count:]), *kernel.init)
    totals = d.parameters(kernel.init, "total")
    finish = [Function(totals, (f(all_axes[:rank], totals),)) for f in kernel.finish]
    return d.Reduction(kernel.space, kernel.init, combine, element, tuple(finish))


def _scatter(kernel: k.Scatter) -> d.Scatter:
    at = axes(len(kernel.space))
    value, combine = kernel.value(at), None
    if kernel.combine is not None:
        f = kernel.combine
        combine = _function(lambda old, new: (f(old, new),), value)
    return d.Scatter(
        kernel.base,
        kernel.space,
        kernel.position(at),
        value,
        combine,
        None if kernel.keep is None else kernel.keep(at),
        _checks(kernel.checks),
    )
