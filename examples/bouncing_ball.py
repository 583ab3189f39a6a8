"""A ball that bounces: a `while_loop` in a `scan`, and a `cond` in that.

The state is a named tuple, one argument of the body. Where the ball meets the floor
within a step, the `cond` finds the moment by bisection: only in the steps that need it.
"""

from typing import Any, NamedTuple

import hopflow as hf

GRAVITY = 9.81
BOUNCE = 0.8  # of the speed remains
STEP = 0.05


class Ball(NamedTuple):
    height: Any
    speed: Any
    bounces: Any


def fly(ball, time):
    """Free flight."""
    height = ball.height + ball.speed * time - GRAVITY / 2 * time**2
    return Ball(height, ball.speed - GRAVITY * time, ball.bounces)


def time_of_impact(ball):
    """When within the next step the ball reaches the floor."""

    def halve(early, late):
        middle = (early + late) / 2
        above = fly(ball, middle).height > 0
        return hf.where(above, middle, early), hf.where(above, late, middle)

    def apart(early, late):
        return late - early > 1e-9

    return hf.while_loop(apart, halve, (0.0 * ball.height, STEP + 0.0 * ball.height))[0]


def bounce(ball):
    impact = time_of_impact(ball)
    at_floor = fly(ball, impact)
    thrown = Ball(0.0 * impact, -BOUNCE * at_floor.speed, ball.bounces + 1)
    return fly(thrown, STEP - impact)


@hf.jit
def simulate(height, steps):
    """Heights after each step, f64[steps], and the number of bounces."""

    def step(ball, _):
        free = fly(ball, STEP)
        after = hf.cond(free.height < 0, bounce, lambda _: free, ball)
        return after, after.height

    start = Ball(height, 0.0 * height, 0)
    ball, heights = hf.scan(step, start, length=steps)
    return heights, ball.bounces


def main():
    heights, bounces = simulate(hf.asarray(1.0, dtype=hf.float64), 40)
    for k, height in enumerate(heights.tolist()):
        print(f"{(k + 1) * STEP:4.2f} s {' ' * round(40 * height)}o")
    print(f"{int(bounces)} bounces")


if __name__ == "__main__":
    main()
