"""Analysis of containers: which ones from outside a block of code changes."""

import ast
from collections.abc import Sequence
from typing import Final

from hopflow.rewrite.names import assigned, reads, walk_scope

_CHANGING: Final = frozenset(
    "append extend insert pop remove clear sort reverse update setdefault popitem add "
    "discard appendleft popleft extendleft rotate".split()
)
"""Methods that change lists, dicts, sets and deques."""


def changed_containers(block: Sequence[ast.stmt]) -> set[str]:
    """Return the containers from outside of which a block sets items or calls changing
    methods, as expressions: names and attributes of names."""
    local_names = assigned(*block)
    texts: set[str] = set()
    for node in (n for statement in block for n in walk_scope(statement)):
        container: ast.expr | None = None
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            container = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            container = node.func.value if node.func.attr in _CHANGING else None
        if container is not None:
            parts = [n for n in ast.walk(container) if isinstance(n, ast.expr)]
            is_path = all(isinstance(n, ast.Name | ast.Attribute) for n in parts)
            if is_path and reads(container).isdisjoint(local_names):
                texts.add(ast.unparse(container))
    return texts


def appended_only(block: Sequence[ast.stmt]) -> set[str]:
    """Return the names that a block uses only as `name.append(value)`."""
    appends: dict[str, int] = {}
    uses: dict[str, int] = {}
    for statement in block:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name):
                uses[node.id] = uses.get(node.id, 0) + 1
        for node in walk_scope(statement):
            match node:
                case ast.Expr(
                    ast.Call(ast.Attribute(ast.Name(name), "append"), [value], [])
                ) if not isinstance(value, ast.Starred):
                    appends[name] = appends.get(name, 0) + 1
    return {name for name, count in appends.items() if uses[name] == count}
