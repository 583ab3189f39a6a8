"""The implicit function theorem: the gradient of a fixed point, by its own rule.

A deep equilibrium layer gives the state that it leaves as it is, z = f(theta, z), and a
`while_loop` finds it. Reverse mode through that loop needs each state on the way, but
the theorem knows the derivative from the last alone: for a cotangent g of z, that of
theta is (df/dtheta)ᵀ u, where u is a fixed point again, of u = g + (df/dz)ᵀ u.
"""

import sys

import hopflow as hf

TOLERANCE = 1e-12  # of a fixed point
AGREEMENT = 1e-10  # of gradients, relative to the largest element
WIDTH = 32


def iterate(step, start):
    """The state that `step` changes no more."""

    def changes(before, after):
        return hf.max(hf.abs(after - before)) > TOLERANCE

    def again(before, after):
        return after, step(after)

    return hf.while_loop(changes, again, (start, step(start)))[1]


def fixed_point(f, theta, start):
    return iterate(lambda z: f(theta, z), start)


implicit = hf.custom_vjp(fixed_point, nondiff_argnums=(0,))


def forward(f, theta, start):
    z = implicit(f, theta, start)
    return z, (theta, z)


def backward(f, saved, g):
    _, pullback = hf.vjp(f, *saved)
    u = iterate(lambda u: g + pullback(u)[1], g)
    return pullback(u)[0], None  # where the search starts does not matter


implicit.defvjp(forward, backward)


def unrolled(f, theta, start):
    """As many steps as it takes, and some more, of which reverse mode keeps each."""
    return hf.fori_loop(0, 100, lambda _, z: f(theta, z), start)


def layer(theta, z):
    weights, inputs = theta
    return hf.tanh(weights @ z + inputs)


def main():
    keys = hf.random.split(hf.random.key(0))
    weights = hf.random.normal(keys[0], (WIDTH, WIDTH), dtype=hf.float64)
    weights *= 0.8 / hf.linalg.matrix_norm(weights, ord=2)  # so that steps contract
    theta = weights, hf.random.normal(keys[1], (WIDTH,), dtype=hf.float64)

    def gradient(solver):
        def loss(theta):
            return hf.sum(solver(layer, theta, hf.zeros_like(theta[1])) ** 2)

        return hf.jit(hf.grad(loss))(theta)

    expected = gradient(unrolled)
    for name, solver in {"theorem": implicit, "while_loop": fixed_point}.items():
        for found, leaf in zip(gradient(solver), expected, strict=True):
            error = hf.max(hf.abs(found - leaf)) / hf.max(hf.abs(leaf))
            if error > AGREEMENT:
                sys.exit(f"{name}: the gradient is off by {error.item():.1e}")
        print(f"{name}: the gradient of the unrolled loop, to {AGREEMENT:.0e}")


if __name__ == "__main__":
    main()
