"""Which containers of around it a block of code changes."""

import ast
from collections.abc import Sequence
from typing import Final

from hopflow.rewrite.names import assigned, reads, walk_own

_CHANGING: Final = frozenset(
    "append extend insert pop remove clear sort reverse update setdefault popitem add "
    "discard appendleft popleft extendleft rotate".split()
)
"""Methods by which lists, dicts, sets and deques change."""


def changed_containers(block: Sequence[ast.stmt]) -> set[str]:
    """The containers of around a block of which it sets items, or calls a method that
    may change them, as the user writes them: names and attributes of names."""
    own = assigned(*block)
    found: set[str] = set()
    for node in (n for statement in block for n in walk_own(statement)):
        container: ast.expr | None = None
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            container = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            container = node.func.value if node.func.attr in _CHANGING else None
        if container is not None:
            parts = [n for n in ast.walk(container) if isinstance(n, ast.expr)]
            is_path = all(isinstance(n, ast.Name | ast.Attribute) for n in parts)
            if is_path and reads(container).isdisjoint(own):
                found.add(ast.unparse(container))
    return found


def appended_only(block: Sequence[ast.stmt]) -> set[str]:
    """The names of which a block says nothing but `name.append(value)`."""
    appends: dict[str, int] = {}
    places: dict[str, int] = {}
    for statement in block:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name):
                places[node.id] = places.get(node.id, 0) + 1
        for node in walk_own(statement):
            match node:
                case ast.Expr(
                    ast.Call(ast.Attribute(ast.Name(name), "append"), [value], [])
                ) if not isinstance(value, ast.Starred):
                    appends[name] = appends.get(name, 0) + 1
    return {name for name, count in appends.items() if places[name] == count}
