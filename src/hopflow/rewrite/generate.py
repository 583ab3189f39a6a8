"""Statements and expressions with conditions, as calls of `hopflow.rewrite.runtime`.

    if test: A else: B      def then(y): A; return x, y
                            def otherwise(y): B; return x, y
                            x, y = if_(test, then, otherwise, (load(lambda: y),), …)

The parameters are the names that a branch or what follows reads and a branch assigns;
the results those that are read afterwards. All others are found as any function finds
them. Loops are made alike, with their state as parameters and as results.
"""

import ast
from collections.abc import Sequence
from typing import Any, Final

from hopflow.rewrite.exits import (
    BROKEN,
    PLAIN,
    TAIL,
    Loop,
    at_line_of,
    exits_of,
    unplace,
    without_exits,
)
from hopflow.rewrite.names import (
    AFTER,
    HEAD,
    assigned,
    declared,
    mark_live,
    reads,
    updated,
    walk_own,
    writers,
)

__all__ = ["RUNTIME", "rewritten"]

RUNTIME: Final = "hopflow_runtime"
"""The name by which the code finds the functions that it calls."""

_EXPRESSIONS: Final = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)


def rewritten(function: ast.FunctionDef, around: dict[str, str]) -> None:
    """Rewrite a function, and those within, in place; `around` are the functions that
    it stands beside and that assign names outside of themselves."""
    without_exits(function)
    mark_live(function)
    params = [*function.args.posonlyargs, *function.args.args]
    first = params[0].arg if params else None
    writing = writers(function.body, around)
    generator = _Generator(declared(function.body), writing, first, _asked(function))
    function.body = generator.block(function.body)


def _asked(function: ast.FunctionDef) -> set[ast.expr]:
    """The expressions of which only the truth is asked."""
    found: set[ast.expr] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
            found.add(node.test)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            found.add(node.operand)
        elif isinstance(node, ast.comprehension):
            found.update(node.ifs)
        elif isinstance(node, ast.BoolOp) and node in found:  # walked before its parts
            found.update(node.values)
    return found


class _Generator(ast.NodeTransformer):
    """Makes code for the statements of one function.

    outer    its names that are global or nonlocal
    writing  the functions that assign a name outside of themselves, and that name
    first    its first parameter
    asked    the expressions of which only the truth is asked
    """

    def __init__(
        self,
        outer: set[str],
        writing: dict[str, str],
        first: str | None,
        asked: set[ast.expr],
    ) -> None:
        self.outer = outer
        self.writing = writing
        self.first = first
        self.asked = asked
        self.count = 0

    def block(self, block: Sequence[ast.stmt]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for statement in block:
            made = self.visit(statement)
            found += made if isinstance(made, list) else [made]
        return found

    # --- functions within -------------------------------------------------------------

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        skipped = any(ast.unparse(d).endswith("skip") for d in node.decorator_list)
        if not skipped and not is_generator(node):
            rewritten(node, self.writing)
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> Any:
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        return node

    # --- statements -------------------------------------------------------------------

    def visit_If(self, node: ast.If) -> Any:
        is_tail = hasattr(node, TAIL)
        reason = self.obstacle(node, [*node.body, *node.orelse])
        if not reason and not is_tail and exits_of([node]):
            reason = "what leaves the block stands within a `with` or `try`"
        if reason:
            return self.plain(node, reason)
        changed = assigned(*node.body, *node.orelse)
        params = sorted(changed & getattr(node, HEAD))
        results = sorted(changed & getattr(node, AFTER))
        name = self.name()
        end = None if is_tail else results
        kept = _texts(sorted(updated(*node.body, *node.orelse)))
        test = _asking(self.visit(node.test), [*node.body, *node.orelse])
        functions = [
            self.function(node, f"{name}then", params, node.body, end),
            self.function(node, f"{name}else", params, node.orelse, end),
        ]
        args = [test, *map(_read, (f.name for f in functions))]
        args.append(_loads(params))
        if is_tail:
            made: ast.stmt = ast.Return(_call("if_return", *args))
            return [*functions, at_line_of(made, node)]
        call = _call("if_", *args, _texts(params), _texts(results), kept)
        return [*functions, *_assign(call, results, set(params), node)]

    def visit_While(self, node: ast.While) -> Any:
        reason = self.obstacle(node, [*node.body, ast.Expr(node.test)])
        if any(isinstance(n, _EXPRESSIONS) for n in ast.walk(node.test)):
            reason = "its condition assigns a name"
        if reason:
            return self.plain(node, reason)
        state = self.state(node)
        name = self.name()
        kept = _texts(sorted(updated(*node.body)))
        test = _asking(self.visit(node.test), node.body)
        if flag := getattr(node, BROKEN, None):
            test = _call("and_", _call("not_", _read(flag)), _lambda(test))
        body = self.function(node, f"{name}body", state, node.body, state)
        check = _define(f"{name}test", state, [ast.Return(test)])
        functions = _read(check.name), _read(body.name)
        call = _call("while_", *functions, _loads(state), _texts(state), kept)
        return [
            at_line_of(check, node),
            body,
            *_assign(call, state, set(state), node),
        ]

    def visit_For(self, node: ast.For) -> Any:
        if reason := self.obstacle(node, [*node.body, ast.Expr(node.target)]):
            setattr(node, PLAIN, reason)
        if hasattr(node, PLAIN):
            return self.plain(node, getattr(node, PLAIN))
        state = self.state(node)
        name = self.name()
        item = f"{name}item"
        first = at_line_of(ast.Assign([node.target], _read(item)), node)
        kept = updated(*node.body) - assigned(node.target)
        items = _asking(self.iterable(node.iter), node.body)
        body = self.function(node, f"{name}body", state, node.body, state, item=item)
        body.body.insert(0, first)
        flag = getattr(node, BROKEN, None)
        at = ast.Constant(None if flag is None else state.index(flag))
        targets = _texts(sorted(assigned(node.target)))
        call = _call(
            "for_",
            items,
            _read(body.name),
            _loads(state),
            _texts(state),
            _texts(sorted(kept)),
            at,
            targets,
        )
        return [body, *_assign(call, state, set(state), node)]

    def visit_Match(self, node: ast.Match) -> Any:
        self.generic_visit(node)
        patterns = (n for case in node.cases for n in ast.walk(case.pattern))
        if any(isinstance(n, ast.MatchValue | ast.MatchSingleton) for n in patterns):
            node.subject = at_line_of(_call("plain_subject", node.subject), node)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        self.generic_visit(node)
        if not isinstance(node.target, ast.Name):
            return node
        name, op = node.target.id, _text(type(node.op).__name__)
        call = _call("augmented", op, _read(name), node.value)
        return at_line_of(ast.Assign([node.target], call), node)

    def visit_Assert(self, node: ast.Assert) -> Any:
        message = self.visit(node.msg) if node.msg else ast.Constant(None)
        call = _call("assert_", self.visit(node.test), _lambda(message))
        return at_line_of(ast.Expr(call), node)

    def state(self, node: Loop) -> list[str]:
        targets = assigned(node.target) if isinstance(node, ast.For) else set()
        return sorted((assigned(*node.body) | targets) & getattr(node, HEAD))

    def iterable(self, node: ast.expr) -> ast.expr:
        made: ast.expr = self.visit(node)
        is_call = isinstance(made, ast.Call) and isinstance(made.func, ast.Name)
        if is_call and made.func.id == "range" and not made.keywords:  # type: ignore
            return _call("range_", made.func, *made.args)  # type: ignore[attr-defined]
        return made

    # --- what stays Python ------------------------------------------------------------

    def obstacle(self, node: ast.stmt, block: Sequence[ast.stmt]) -> str | None:
        """Why a statement must stay as it is, if it must."""
        if reason := getattr(node, PLAIN, None):
            return str(reason)
        if any(isinstance(statement, ast.Raise) for statement in block):
            return "a `raise` stands in it; use `hf.check`"
        if names := sorted(assigned(*block) & self.outer):
            return f"it assigns `{names[0]}`, which is global or nonlocal"
        if reason := self.writer(*block):
            return reason
        for n in (n for statement in block for n in walk_own(statement)):
            if isinstance(n, ast.Attribute) and not isinstance(n.ctx, ast.Load):
                text = ast.unparse(n)
                return f"it assigns `{text}`; assign a local name, and `{text}` after"
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Del):
                return f"it deletes `{n.id}`"
        return None

    def writer(self, *nodes: ast.AST) -> str | None:
        """Which function they call that assigns a name outside of itself, if any."""
        for called in sorted(reads(*nodes) & self.writing.keys()):
            name = self.writing[called]
            return (
                f"`{called}`, which it calls, assigns `{name}`, which is global or "
                f"nonlocal; return what `{name}` becomes"
            )
        return None

    def expression_obstacle(self, *parts: ast.expr) -> str | None:
        """Why an expression whose `parts` may not be evaluated must stay as it is."""
        if any(isinstance(n, _EXPRESSIONS) for part in parts for n in ast.walk(part)):
            return "it assigns a name"
        return self.writer(*parts)

    def plain(self, node: ast.If | Loop, reason: str) -> ast.stmt:
        self.generic_visit(node)
        if isinstance(node, ast.For):
            node.iter = _call("plain_items", self.iterable(node.iter), _text(reason))
        else:
            node.test = _plain(node.test, type(node).__name__.lower(), reason)
        return at_line_of(node, node)

    # --- expressions ------------------------------------------------------------------

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        name = "and_" if isinstance(node.op, ast.And) else "or_"
        if reason := self.expression_obstacle(*node.values[1:]):
            self.generic_visit(node)
            kind = name.removesuffix("_")
            node.values[:-1] = [_plain(v, kind, reason) for v in node.values[:-1]]
            return at_line_of(node, node)
        if node not in self.asked:
            name += "value"
        *rest, made = [self.visit(value) for value in node.values]
        for value in reversed(rest):
            made = _call(name, value, _lambda(made))
        return at_line_of(made, node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not):
            return at_line_of(_call("not_", node.operand), node)
        return node

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        if reason := self.expression_obstacle(node.body, node.orelse):
            self.generic_visit(node)
            node.test = _plain(node.test, "if", reason)
            return at_line_of(node, node)
        test, body, orelse = map(self.visit, (node.test, node.body, node.orelse))
        call = _call("if_return", test, _lambda(body), _lambda(orelse), _loads([]))
        return at_line_of(call, node)

    def visit_Compare(self, node: ast.Compare) -> Any:
        if len(node.ops) == 1 or self.expression_obstacle(*node.comparators):
            return self.generic_visit(node)
        pairs: list[ast.expr] = []
        for op, value in zip(node.ops, node.comparators, strict=True):
            two = ast.Compare(_read("x"), [op], [_read("y")])
            pairs += [_lambda(two, "x", "y"), _lambda(self.visit(value))]
        return at_line_of(_call("compare", self.visit(node.left), *pairs), node)

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        is_super = isinstance(node.func, ast.Name) and node.func.id == "super"
        if is_super and self.first and not node.args:  # it looks at its own function
            node.args = [_read("__class__"), _read(self.first)]
            ast.fix_missing_locations(node)
        return node

    # --- functions that are made ------------------------------------------------------

    def name(self) -> str:
        self.count += 1
        return f"hopflow_{self.count}_"

    def function(
        self,
        node: ast.stmt,
        name: str,
        params: Sequence[str],
        body: Sequence[ast.stmt],
        results: Sequence[str] | None,
        *,
        item: str | None = None,
    ) -> ast.FunctionDef:
        """A block as a function; `results` None: it returns by itself."""
        made = self.block(body)
        if results is not None:
            made.append(ast.Return(_loads(results)))  # some may have no value
        names = [*([item] if item else []), *params]
        return at_line_of(_define(name, names, made), node)


def is_generator(function: ast.FunctionDef) -> bool:
    kinds = (ast.Yield, ast.YieldFrom, ast.Await)
    own = (n for statement in function.body for n in walk_own(statement))
    return any(isinstance(n, kinds) for n in own)


def _plain(test: ast.expr, kind: str, reason: str) -> ast.expr:
    return _call("plain", test, _text(kind), _text(reason))


def _assign(
    call: ast.expr, names: Sequence[str], maybe: set[str], where: ast.stmt
) -> list[ast.stmt]:
    """`x, y = call`; a name that is still unbound is unbound again."""
    if not names:
        return [at_line_of(ast.Expr(call), where)]
    target = ast.Tuple([ast.Name(n, ast.Store()) for n in names], ast.Store())
    made: list[ast.stmt] = [ast.Assign([target], call)]
    for name in names:
        if name in maybe:
            unbound = ast.Compare(_read(name), [ast.Is()], [_runtime("UNBOUND")])
            delete = ast.Delete([ast.Name(name, ast.Del())])
            made.append(ast.If(unbound, [delete], []))
    return [at_line_of(statement, where) for statement in made]


def _asking(asked: ast.expr, block: Sequence[ast.stmt]) -> ast.expr:
    """What decides over a block, which may set items of containers from outside."""
    own = assigned(*block)
    texts: set[str] = set()
    for node in (n for statement in block for n in walk_own(statement)):
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            parts = [n for n in ast.walk(node.value) if isinstance(n, ast.expr)]
            is_path = all(isinstance(n, ast.Name | ast.Attribute) for n in parts)
            if is_path and reads(node.value).isdisjoint(own):
                texts.add(ast.unparse(node.value))
    if not texts:
        return asked
    loads = [ast.parse(text, mode="eval").body for text in sorted(texts)]
    found = _tuple(_call("load", _lambda(value)) for value in loads)
    return _call("asking", asked, found, _texts(sorted(texts)))


def _define(
    name: str, params: Sequence[str], body: Sequence[ast.stmt]
) -> ast.FunctionDef:
    function = ast.parse(f"def {name}({', '.join(params)}): pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    unplace(function)
    function.body = list(body)
    return function


def _runtime(name: str) -> ast.expr:
    return ast.Attribute(_read(RUNTIME), name, ast.Load())


def _call(name: str, *args: ast.expr) -> ast.expr:
    return ast.Call(_runtime(name), list(args), [])


def _read(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _lambda(body: ast.expr, *params: str) -> ast.expr:
    made = ast.parse(f"lambda {', '.join(params)}: 0", mode="eval").body
    assert isinstance(made, ast.Lambda)
    unplace(made.args)
    return ast.Lambda(made.args, body)


def _tuple(items: Any) -> ast.expr:
    return ast.Tuple(list(items), ast.Load())


def _loads(names: Sequence[str]) -> ast.expr:
    return _tuple(_call("load", _lambda(_read(name))) for name in names)


def _text(text: str) -> ast.expr:
    return ast.Constant(text)


def _texts(names: Sequence[str]) -> ast.expr:
    return _tuple(map(_text, names))
