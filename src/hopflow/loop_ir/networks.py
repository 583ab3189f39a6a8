"""Sorting networks: the exchanges that sort a number of elements, whatever they are."""

from collections.abc import Iterator


def transpositions(n: int) -> Iterator[tuple[int, int]]:
    """Yield the exchanges of neighbours that sort `n` elements and keep the order of
    equal ones: n rounds of odd-even transposition (D. Knuth, The Art of Computer
    Programming, volume 3, section 5.3.4)."""
    for first in range(n):
        for k in range(first % 2, n - 1, 2):
            yield k, k + 1


def merge_exchanges(n: int) -> Iterator[tuple[int, int]]:
    """Yield the exchanges that sort `n` elements by Batcher's merge exchange (D. Knuth,
    The Art of Computer Programming, volume 3, section 5.2.2, algorithm M): fewer, but
    equal elements may change places."""
    half = 1 << (n - 1).bit_length() >> 1
    p = half
    while p:
        q, r, distance = half, 0, p
        while True:
            for k in range(n - distance):
                if k & p == r:
                    yield k, k + distance
            if q == p:
                break
            distance, q, r = q - p, q >> 1, p
        p >>= 1
