"""The length and the damping of a pendulum, from noisy measurements of its angle.

An adaptive ODE solver: Dormand and Prince's method of order 5, in a `while_loop` that
goes on until the next measurement, and in it a `cond` that accepts a step or rejects
it. How many steps that takes depends on the parameters, and only the run knows; the
gradient of the squared errors goes back through those that were made.

The measurements are off by 0.05 radians, and both parameters are found to 1 %.
"""

import sys

import numpy as np
from scipy.integrate import solve_ivp
from scipy.optimize import minimize

import hopflow as hf

GRAVITY = 9.81
TRUTH = {"length": 1.2, "damping": 0.3}
GUESS = [1.0, 0.1]
START = [2.0, 0.0]  # angle and speed
TIMES = np.linspace(0, 10, 101)
NOISE = 0.05  # radians
TOLERANCE = 1e-7  # of a step

# Dormand and Prince 1980. The last stage is at the end of the step: its row is the
# solution of order 5. ERROR is the difference to the one of order 4.
STAGES = [
    [1 / 5],
    [3 / 40, 9 / 40],
    [44 / 45, -56 / 15, 32 / 9],
    [19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729],
    [9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656],
    [35 / 384, 0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84],
]
ERROR = [71 / 57600, 0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40]


def pendulum(state, length, damping):
    """The rate of change of f64[angle and speed]."""
    angle, speed = state
    return hf.stack([speed, -damping * speed - GRAVITY / length * hf.sin(angle)])


def weighted(weights, slopes):
    return sum(w * slope for w, slope in zip(weights, slopes, strict=True) if w)


def solve(rate, state, step, duration):
    """The state after `duration`, and the step size to go on with."""

    def unfinished(left, step, state):
        return left > 0

    def advance(left, step, state):
        h = hf.minimum(step, left)
        slopes = [rate(state)]
        for row in STAGES:
            moved = state + h * weighted(row, slopes)
            slopes.append(rate(moved))
        # The state hardly depends on the sizes of the steps: to the derivative they are
        # constants.
        error = hf.stop_gradient(hf.max(hf.abs(h * weighted(ERROR, slopes))))
        fitting = h * hf.clip(0.9 * (TOLERANCE / (error + 1e-30)) ** 0.2, 0.2, 5.0)

        def accept():  # a last, short step says nothing against longer ones
            return left - h, hf.maximum(step, fitting), moved

        def reject():
            return left, fitting, state

        return hf.cond(error <= TOLERANCE, accept, reject)

    _, step, state = hf.while_loop(unfinished, advance, (duration, step, state))
    return state, step


def misfit(log_parameters, angles):
    """The mean of the squared errors, for measured angles f64[time]."""
    length, damping = hf.exp(log_parameters)

    def rate(state):
        return pendulum(state, length, damping)

    def until_next(carry, measured):
        state, step = solve(rate, *carry, TIMES[1] - TIMES[0])
        return (state, step), (state[0] - measured) ** 2

    _, errors = hf.scan(
        until_next, (hf.asarray(START, dtype=hf.float64), 0.01), angles[1:]
    )
    return hf.mean(errors)


def measured_angles():
    """What SciPy's solver says, and noise."""
    exact = solve_ivp(
        lambda time, state: pendulum(hf.asarray(state), **TRUTH),
        t_span=(TIMES[0], TIMES[-1]),
        y0=START,
        t_eval=TIMES,
        rtol=1e-9,
        atol=1e-9,
    )
    return exact.y[0] + np.random.default_rng(0).normal(0, NOISE, TIMES.shape)


def main():
    angles = hf.asarray(measured_angles())
    derived = hf.jit(hf.value_and_grad(misfit))

    def objective(log_parameters):
        value, slope = derived(hf.asarray(log_parameters), angles)
        return value.item(), slope

    fit = minimize(objective, x0=np.log(GUESS), jac=True, method="BFGS")
    for (name, true), estimate in zip(TRUTH.items(), np.exp(fit.x), strict=True):
        print(f"{name:7}  {estimate:.3f}  in truth: {true:.3f}")
        if abs(estimate - true) > 0.01 * true:
            sys.exit(f"{name} is not within 1 % of the truth")


if __name__ == "__main__":
    main()
