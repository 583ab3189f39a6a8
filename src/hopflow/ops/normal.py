"""The quantile function of the normal distribution: its record and its computation.

`docs/add_an_operation.md` explains this file as the example of an operation.
"""

import math
from typing import Final

from hopflow.loop_ir.expr import Expr, call
from hopflow.loop_ir.math.arith import (
    INF,
    absolute,
    compare,
    copysign,
    div,
    eq,
    lt,
    mul,
    neg,
    polynomial,
    select,
    sqrt,
    sub,
)
from hopflow.loop_ir.scalars import scipy_function
from hopflow.ops import scalar
from hopflow.ops.math import exp
from hopflow.ops.opdef import HALVES, OpDef, Reference
from hopflow.ops.rules import elementwise, floating

# Numerators and denominators of rational functions, the constant term first, from
# M. J. Wichura, "Algorithm AS 241: The Percentage Points of the Normal Distribution",
# Applied Statistics 37 (1988), routine PPND16.
# ndtri(1/2 + q) = q P(r) / Q(r), r = 0.425**2 - q**2, |q| <= 0.425
_CENTRE: Final = (
    (
        *(3.3871328727963666080, 1.3314166789178437745e2, 1.9715909503065514427e3),
        *(1.3731693765509461125e4, 4.5921953931549871457e4, 6.7265770927008700853e4),
        *(3.3430575583588128105e4, 2.5090809287301226727e3),
    ),
    (
        *(1.0, 4.2313330701600911252e1, 6.8718700749205790830e2),
        *(5.3941960214247511077e3, 2.1213794301586595867e4, 3.9307895800092710610e4),
        *(2.8729085735721942674e4, 5.2264952788528545610e3),
    ),
)
# -ndtri(p) = P(r - 1.6) / Q(r - 1.6), r = sqrt(-log(p)) <= 5
_TAIL: Final = (
    (
        *(1.42343711074968357734, 4.63033784615654529590, 5.76949722146069140550),
        *(3.64784832476320460504, 1.27045825245236838258, 2.41780725177450611770e-1),
        *(2.27238449892691845833e-2, 7.74545014278341407640e-4),
    ),
    (
        *(1.0, 2.05319162663775882187, 1.67638483018380384940),
        *(6.89767334985100004550e-1, 1.48103976427480074590e-1),
        *(1.51986665636164571966e-2, 5.47593808499534494600e-4),
        1.05075007164441684324e-9,
    ),
)
# -ndtri(p) = P(r - 5) / Q(r - 5), r = sqrt(-log(p)) >= 5
_FAR: Final = (
    (
        *(6.65790464350110377720, 5.46378491116411436990, 1.78482653991729133580),
        *(2.96560571828504891230e-1, 2.65321895265761230930e-2),
        *(1.24266094738807843860e-3, 2.71155556874348757815e-5),
        2.01033439929228813265e-7,
    ),
    (
        *(1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1),
        *(1.48753612908506148525e-2, 7.86869131145613259100e-4),
        *(1.84631831751005468180e-5, 1.42151175831644588870e-7),
        2.04426310338993978564e-15,
    ),
)


def _quantile(p: Expr) -> Expr:
    """Return the x at which the distribution function is `p` (f32 or f64)."""
    q = sub(p, 0.5)
    is_central = compare("le", absolute(q), 0.425)
    tail = select(lt(q, 0.0), p, sub(1.0, p))
    r = sqrt(neg(call("log", tail)))
    is_near = compare("le", r, 5.0)
    square, near, far = sub(0.425**2, mul(q, q)), sub(r, 1.6), sub(r, 5.0)
    above, below = (
        select(
            is_central,
            polynomial(square, centre),
            select(is_near, polynomial(near, tail_), polynomial(far, far_)),
        )
        for centre, tail_, far_ in zip(_CENTRE, _TAIL, _FAR, strict=True)
    )
    sign = copysign(1.0, q)
    result = div(mul(above, select(is_central, q, sign)), below)
    return select(eq(tail, 0.0), mul(sign, INF), result)


ndtri: Final[OpDef] = elementwise(
    "ndtri",
    """The quantile function of the standard normal distribution: the x for which
    a normal number is less than x with probability `p`.

    f[*s] -> f[*s]; integers become the default float. -inf at 0, inf at 1, and a NaN
    outside of [0, 1]. Compiled results are exact to 5 units in the last place
    (Wichura's algorithm AS 241); numbers of 16 bits are rounded once more.

    Raises:
        DTypeError: `p` is complex.

        >>> hf.ndtri(hf.asarray([0.025, 0.5]))
        Tensor([-1.959964,  0.      ], f32[2])
    """,
    scipy_function("ndtri"),
    scalar.in_float32(_quantile),
    arity=1,
    promote=floating,
    low=0.001,
    high=0.999,
    jvp=(lambda t, out, p: t * (math.sqrt(2 * math.pi) * exp(out * out / 2)),),
    ulps=8,
    reference=Reference(
        *("scipy.special.ndtri", "jax.scipy.special.ndtri"),
        jax_ulps=400,  # of the derivative, whose error is x**2 times that of x
        not_in_jax=HALVES,
    ),
)
