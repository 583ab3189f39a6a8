"""Builtins that fold items, as loops, which are rewritten like the user's code."""

from typing import Any

from hopflow.rewrite.items import Items


def sum_(items: Items, start: Any = 0) -> Any:
    total = start
    for item in items:
        total = total + item
    return total


def any_(items: Items) -> Any:
    for item in items:  # noqa: SIM110 - this implements `any`
        if item:
            return True
    return False


def all_(items: Items) -> Any:
    for item in items:  # noqa: SIM110 - this implements `all`
        if not item:
            return False
    return True


def min_(items: Items, *, key: Any = None, default: Any = None) -> Any:
    if isinstance(items.length, int) and items.length == 0:
        return min([], default=default) if default is not None else min([])
    best = items.at(0)
    if key is None:
        for item in items:
            if item < best:
                best = item
    else:
        least = key(best)
        for item in items:
            other = key(item)
            if other < least:
                best, least = item, other
    return best


def max_(items: Items, *, key: Any = None, default: Any = None) -> Any:
    if isinstance(items.length, int) and items.length == 0:
        return max([], default=default) if default is not None else max([])
    best = items.at(0)
    if key is None:
        for item in items:
            if item > best:
                best = item
    else:
        most = key(best)
        for item in items:
            other = key(item)
            if other > most:
                best, most = item, other
    return best
