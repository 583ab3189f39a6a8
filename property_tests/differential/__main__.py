"""`python -m property_tests.differential --programs N --seed S`."""

import argparse
import itertools
import time

from property_tests.differential.judge import run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--no-jax", action="store_true")
    given = parser.parse_args()
    start, failed, done = time.monotonic(), 0, 0
    for seed in itertools.islice(itertools.count(given.seed), given.programs):
        if time.monotonic() - start > given.seconds:
            break
        done += 1
        if (text := run(seed, use_jax=not given.no_jax)) is not None:
            failed += 1
            print(text, end="\n\n" + "#" * 88 + "\n\n", flush=True)
    print(f"{done} programs from seed {given.seed}, {failed} disagreements")


if __name__ == "__main__":
    main()
