"""Rewriting of `match` statements to `if`, for patterns of values and names.

    match a:                       subject = a
        case 0 | 1: b              if subject == 0 or subject == 1: b
        case n if c: d             else:
        case _: e                      n = subject
                                       if c: d
                                       else: e

Statements with structural patterns (sequences, mappings, classes) remain Python.
"""

import ast

from hopflow.rewrite.exits import SCOPES, at_line_of
from hopflow.rewrite.names import Scope


def without_matches(function: Scope) -> None:
    """Rewrite the `match` statements of a function in place."""
    rewriter = _Matches()
    body: list[ast.stmt] = []
    for statement in function.body:
        statements = rewriter.visit(statement)
        body += statements if isinstance(statements, list) else [statements]
    function.body = body


class _Matches(ast.NodeTransformer):
    def __init__(self) -> None:
        self.count = 0

    def generic_visit(self, node: ast.AST) -> ast.AST:
        return node if isinstance(node, SCOPES) else super().generic_visit(node)

    def visit_Match(self, node: ast.Match) -> list[ast.stmt] | ast.AST:
        self.generic_visit(node)
        if not all(_is_simple(case.pattern) for case in node.cases):
            return node
        self.count += 1
        name = f"hopflow_subject_{self.count}"
        block: list[ast.stmt] = []
        for case in reversed(node.cases):
            block = _with_case(case, name, block)
        first = ast.Assign([ast.Name(name, ast.Store())], node.subject)
        return [at_line_of(statement, node) for statement in (first, *block)]


def _is_simple(pattern: ast.pattern) -> bool:
    match pattern:
        case ast.MatchValue() | ast.MatchSingleton():
            return True
        case ast.MatchAs(inner):
            names_twice = isinstance(inner, ast.MatchAs)
            return inner is None or (not names_twice and _is_simple(inner))
        case ast.MatchOr(patterns):
            # A name in an alternative would need the test of that alternative.
            return all(isinstance(p, _VALUES) for p in patterns)
    return False


_VALUES = (ast.MatchValue, ast.MatchSingleton)


def _with_case(
    case: ast.match_case, subject: str, otherwise: list[ast.stmt]
) -> list[ast.stmt]:
    """Return the statements that run a case, or else those of the cases after it."""
    test, name = _test(case.pattern, subject)
    block = case.body
    if name is not None:
        block = [ast.Assign([ast.Name(name, ast.Store())], _read(subject))]
        if case.guard is None:
            block += case.body
        elif test is None:
            return [*block, ast.If(case.guard, case.body, otherwise)]
        else:  # the guard reads the name, which stays bound if it fails
            binding = ast.NamedExpr(ast.Name(name, ast.Store()), _read(subject))
            pair = ast.Tuple([binding, case.guard], ast.Load())
            guard = ast.Subscript(pair, ast.Constant(1), ast.Load())
            test, block = ast.BoolOp(ast.And(), [test, guard]), case.body
    elif case.guard is not None:
        tests = [case.guard] if test is None else [test, case.guard]
        test = tests[0] if len(tests) == 1 else ast.BoolOp(ast.And(), tests)
    return block if test is None else [ast.If(test, block, otherwise)]


def _test(pattern: ast.pattern, subject: str) -> tuple[ast.expr | None, str | None]:
    """Return the condition that a pattern matches, None if always; and the name that it
    binds."""
    match pattern:
        case ast.MatchValue(value):
            return ast.Compare(_read(subject), [ast.Eq()], [value]), None
        case ast.MatchSingleton(value):
            constant = ast.Constant(value)
            return ast.Compare(_read(subject), [ast.Is()], [constant]), None
        case ast.MatchOr(patterns):
            tests = [_test(p, subject)[0] for p in patterns]
            return ast.BoolOp(ast.Or(), [t for t in tests if t is not None]), None
        case ast.MatchAs(inner, name):
            return (None if inner is None else _test(inner, subject)[0]), name
    raise AssertionError(pattern)


def _read(name: str) -> ast.expr:
    return ast.Name(name, ast.Load())
