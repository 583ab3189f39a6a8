"""Comprehensions as functions with a loop.

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
"""What makes something of a generator expression: how it begins, what it does with an
item, which stands here as 0, and how it ends."""


def as_loop(
    node: ast.ListComp | ast.GeneratorExp, name: str, kind: str
) -> ast.FunctionDef:
    """A function of the items of the first `for`, which makes something of what a
    comprehension yields: one of `CONSUMERS`. The parts of `node` become its parts."""
    where = ast.Expr(node.elt, lineno=node.lineno, col_offset=node.col_offset)
    begin, step, end = (parsed(text, where) for text in CONSUMERS[kind])
    block: list[ast.stmt] = step
    for statement in block:
        _Filled(node.elt).visit(statement)
    for generator in reversed(node.generators):
        for test in reversed(generator.ifs):
            block = [ast.copy_location(ast.If(test, block, []), test)]
        loop = ast.For(generator.target, generator.iter, block, [])
        block = [ast.copy_location(loop, generator.iter)]
    loop.iter = ast.copy_location(ast.Name("hopflow_items", ast.Load()), loop.iter)
    [made] = parsed(f"def {name}(hopflow_items, hopflow_start=0): pass", where)
    assert isinstance(made, ast.FunctionDef)
    made.body = [*begin, *block, *end]
    return made


class _Filled(ast.NodeTransformer):
    """Puts a value in the place of 0."""

    def __init__(self, value: ast.expr) -> None:
        self.value = value

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        is_place = node.value == 0 and not isinstance(node.value, bool)
        return self.value if is_place else node
