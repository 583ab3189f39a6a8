"""Rewriting of comprehensions to functions with a loop.

[a for x in xs if b]        def of(items):
                                out = []
                                for x in items:
                                    if b:
                                        out.append(a)
                                return out
"""

import ast
from typing import Final

from hopflow.rewrite.exits import parsed

_BEGIN, _STEP, _END = range(3)

_LIST: Final = ("hopflow_out = []", "hopflow_out.append(0)", "return hopflow_out")
CONSUMERS: Final = {
    "list": _LIST,
    "sum": (
        "hopflow_out = hopflow_start",
        "hopflow_out = hopflow_out + 0",
        "return hopflow_out",
    ),
    "any": ("pass", "if 0:\n    return True", "return False"),
    "all": ("pass", "if not 0:\n    return False", "return True"),
}
"""Builtin that consumes a generator expression -> its loop: the statements before it,
those for an item, with 0 as a placeholder, and those after it."""


def as_loop(
    node: ast.ListComp | ast.GeneratorExp, name: str, kind: str
) -> ast.FunctionDef:
    """Return a function of the items of the first `for`, with the loop of a consumer
    over the values of a comprehension.

    Args:
        node: The comprehension, whose nodes become part of the function.
        kind: The consumer, one of `CONSUMERS`.
    """
    where = ast.Expr(node.elt, lineno=node.lineno, col_offset=node.col_offset)
    begin, step, end = (parsed(text, where) for text in CONSUMERS[kind])
    block: list[ast.stmt] = step
    for statement in block:
        _Placeholder(node.elt).visit(statement)
    for generator in reversed(node.generators):
        for test in reversed(generator.ifs):
            block = [ast.copy_location(ast.If(test, block, []), test)]
        loop = ast.For(generator.target, generator.iter, block, [])
        block = [ast.copy_location(loop, generator.iter)]
    loop.iter = ast.copy_location(ast.Name("hopflow_items", ast.Load()), loop.iter)
    [function] = parsed(f"def {name}(hopflow_items, hopflow_start=0): pass", where)
    assert isinstance(function, ast.FunctionDef)
    function.body = [*begin, *block, *end]
    return function


class _Placeholder(ast.NodeTransformer):
    """Replaces the placeholder 0 by a value."""

    def __init__(self, value: ast.expr) -> None:
        self.value = value

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        is_place = node.value == 0 and not isinstance(node.value, bool)
        return self.value if is_place else node
