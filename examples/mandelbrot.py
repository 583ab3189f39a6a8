"""The Mandelbrot set: a `while_loop` for each point, under a `map`.

Each point iterates for as many steps as it needs, and not for as many as the slowest.
"""

import hopflow as hf

SHADES = hf.asarray([ord(c) for c in " .:-=+*#%@"])


def escape_time(cr, ci, limit):
    """After how many steps z -> z² + c leaves the disk of radius 2, at most `limit`."""

    def inside(steps, x, y):
        return (steps < limit) & (x * x + y * y <= 4.0)

    def step(steps, x, y):
        return steps + 1, x * x - y * y + cr, 2.0 * x * y + ci

    return hf.while_loop(inside, step, (0, 0.0 * cr, 0.0 * ci))[0]


@hf.jit
def picture(xs, ys, limit):
    """The character codes of the picture, i64[len(ys), len(xs)]."""

    def row(y):
        return hf.map(lambda x: escape_time(x, y, limit), xs)

    steps = hf.map(row, ys)
    return hf.take(SHADES, steps * 9 // limit)


def main():
    xs = hf.linspace(-2.1, 0.7, 44)
    ys = hf.linspace(-1.1, 1.1, 15)
    for line in picture(xs, ys, 20).tolist():
        print("".join(map(chr, line)).rstrip())


if __name__ == "__main__":
    main()
