"""Conway's Game of Life: a `scan` that ends once nothing changes."""

import hopflow as hf

PATTERN = ["###", "#.#", "#.#"]
ROWS, COLUMNS = 10, 22


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
    """All generations, i64[limit, rows, columns], up to one that equals the last.

    The carry is a pair: a generation, and whether it differs from the one before.
    """

    def step(carry, _):
        cells, _ = carry
        after = generation(cells)
        return (after, hf.any(after != cells)), after

    def still(carry):
        return ~carry[1]

    start = cells, hf.asarray(True)
    _, generations, steps = hf.scan(step, start, length=limit, until=still)
    return generations, steps


def main():
    cells = hf.zeros((ROWS, COLUMNS), dtype=hf.int64)
    cells[3:6, 9:12] = hf.asarray([[int(c == "#") for c in row] for row in PATTERN])
    generations, steps = play(cells, 200)
    print(f"still after {int(steps)} generations:")
    for row in generations[int(steps) - 1].tolist():
        print("".join(".#"[cell] for cell in row))


if __name__ == "__main__":
    main()
