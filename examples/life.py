"""Conway's Game of Life: a `scan` over generations that ends once nothing changes."""

import hopflow as hf

START = """
............
.....##.....
....##......
.....#......
............
............
............
"""


def generation(cells):
    """The next generation of i64[rows, columns], on a torus."""
    around = sum(
        hf.roll(cells, (down, right), axis=(0, 1))
        for down in (-1, 0, 1)
        for right in (-1, 0, 1)
        if (down, right) != (0, 0)
    )
    born = around == 3
    stays = (cells == 1) & (around == 2)
    return hf.astype(born | stays, hf.int64)


@hf.jit
def play(cells, limit):
    """All generations until one equals the last: i64[limit, rows, columns], and how many.

    The carry is a pair: the generation, and whether it differs from the one before.
    """

    def step(carry, _):
        cells, _ = carry
        after = generation(cells)
        return (after, hf.any(after != cells)), after

    start = cells, hf.asarray(True)
    _, generations, steps = hf.scan(
        step, start, length=limit, until=lambda carry: ~carry[1]
    )
    return generations, steps


def main():
    rows = START.split()
    cells = hf.asarray([[int(c == "#") for c in row] for row in rows])
    generations, steps = play(cells, 200)
    print(f"still after {int(steps)} generations:")
    for row in generations[int(steps) - 1].tolist():
        print("".join(".#"[cell] for cell in row))


if __name__ == "__main__":
    main()
