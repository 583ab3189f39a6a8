"""Rewriting of statements and expressions with conditions to calls of the runtime.

    if test: A else: B      def then(): nonlocal x, y; A
                            def otherwise(): nonlocal x, y; B
                            def state(…): get or set x and y
                            if_(test, then, otherwise, state, …)

The state consists of the names that a branch assigns and that are live in it or after
it. If the condition is a bool, `if_` only calls the branch, so that names behave as in
Python (closures that read them later, `del`, unbound names). Loops are rewritten in the
same way.
"""

import ast
from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any, Final, TypeAlias

from hopflow.rewrite.comprehensions import CONSUMERS, as_loop
from hopflow.rewrite.containers import appended_only, changed_containers
from hopflow.rewrite.exits import (
    BROKEN,
    RESULT,
    TAIL,
    Loop,
    at_line_of,
    unplace,
    without_exits,
)
from hopflow.rewrite.matching import without_matches
from hopflow.rewrite.names import (
    AFTER,
    CAPTURED,
    HEAD,
    Scope,
    assigned,
    assigned_by_inner,
    declared,
    mark_live,
    params_of,
    reads,
    updated,
    walk_scope,
    writers,
)

RUNTIME: Final = "hopflow_runtime"
"""The name of `hopflow.rewrite.runtime` in rewritten code."""

_Comprehension: TypeAlias = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_EXPRESSIONS: Final = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)
_YIELDS: Final = (ast.Await, ast.Yield, ast.YieldFrom, ast.AsyncFor, ast.AsyncWith)
_FRAMES: Final = {"locals", "vars", "dir", "eval", "exec"}


def rewritten(
    function: ast.FunctionDef | ast.AsyncFunctionDef,
    around: dict[str, str],
    enclosing: set[str] = frozenset(),  # type: ignore[assignment]
) -> None:
    """Rewrite a function and its inner functions in place.

    Args:
        around: The functions visible to it that assign a name outside of themselves ->
            such a name.
        enclosing: The local names of enclosing functions that are rewritten too.
    """
    without_matches(function)
    has_writers = bool(assigned_by_inner(function.body))

    def assigns(test: ast.expr) -> bool:
        kinds = (ast.NamedExpr, ast.Call) if has_writers else ast.NamedExpr
        return any(isinstance(n, kinds) for n in ast.walk(test))

    without_exits(function, assigns)
    mark_live(function)
    generator = _Generator(function, around, enclosing)
    generator.rewrite(function)


def _predicates(function: ast.AST) -> set[ast.expr]:
    """Return the expressions of which only the truth value is used."""
    predicates: set[ast.expr] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
            predicates.add(node.test)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            predicates.add(node.operand)
        elif isinstance(node, ast.comprehension):
            predicates.update(node.ifs)
        elif isinstance(node, ast.BoolOp) and node in predicates:  # parents come first
            predicates.update(node.values)
    return predicates


class _Generator(ast.NodeTransformer):
    """Rewrites the statements of one function.

    declared   its global and nonlocal names
    globals    its global names
    outer      the declared names whose assignment is visible outside the rewritten
               functions
    names      the local names of it and of enclosing rewritten functions
    shared     the names that inner functions assign
    writing    function that assigns a name outside of itself -> that name
    first      the name of its first parameter
    predicates the expressions of which only the truth value is used
    moved      the names that are assigned in generated functions
    nested     whether the visited node is in a lambda or comprehension
    before     generated functions that the current statement needs
    """

    def __init__(
        self, function: Scope, around: dict[str, str], enclosing: set[str]
    ) -> None:
        body = function.body
        params = [*function.args.posonlyargs, *function.args.args]
        self.globals = declared(body, ast.Global)
        self.declared = declared(body)
        self.params = params_of(function)
        self.names = enclosing | self.params | (assigned(*body) - self.declared)
        self.outer = self.declared - enclosing
        self.shared = assigned_by_inner(body) & self.names
        self.around = around
        self.writing = writers(body, around, set())
        self.writing_outside = writers(body, around, self.names)
        self.first = params[0].arg if params else None
        self.predicates = _predicates(function)
        self.moved: set[str] = set()
        self.nested = False
        self.before: list[ast.stmt] = []
        self.count = 0

    def rewrite(self, function: Scope) -> None:
        """Rewrite the body of the function in place."""
        body = function.body
        docstring = body[:1] if ast.get_docstring(function) is not None else []
        nonlocals = self.declared - self.globals
        statements = self.block(body[len(docstring) :])
        preamble = _declarations(self.globals, nonlocals)
        if unbound := sorted(self.moved - self.params - self.declared):
            # Generated functions assign these names as nonlocals, which must be locals
            # of this function.
            [binding] = ast.parse(f"if False: {' = '.join(unbound)} = None").body
            unplace(binding)
            preamble.append(binding)
        first = body[0]
        preamble = [at_line_of(statement, first) for statement in preamble]
        function.body = [*docstring, *preamble, *statements]

    def block(self, block: Sequence[ast.stmt]) -> list[ast.stmt]:
        """Return the rewritten statements of a block."""
        statements: list[ast.stmt] = []
        for statement in block:
            statements += self.visit(statement)
        return statements

    # --- inner functions --------------------------------------------------------------

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        return self.inner(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> Any:
        return self.inner(node)

    def inner(self, node: Scope) -> Any:
        skipped = any(ast.unparse(d).endswith("skip") for d in node.decorator_list)
        if not skipped and not _is_async_generator(node):
            around = {n: w for n, w in self.writing.items() if n not in params_of(node)}
            rewritten(node, around, self.names)
        node.args = self.visit(node.args)
        node.decorator_list = [self.visit(d) for d in node.decorator_list]
        return node

    def visit_Lambda(self, node: ast.Lambda) -> Any:
        node.args = self.visit(node.args)
        outer_state = self.first, self.nested
        self.first, self.nested = None, True
        node.body = self.visit(node.body)
        self.first, self.nested = outer_state
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        # Generated functions cannot access the names of a class body, which is not
        # rewritten.
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                if not _is_async_generator(statement):
                    rewritten(statement, self.writing, self.names)
            elif isinstance(statement, ast.ClassDef):
                self.visit_ClassDef(statement)
        return node

    # --- names ------------------------------------------------------------------------

    def visit_Global(self, node: ast.Global) -> Any:
        return at_line_of(ast.Pass(), node)  # declared at the start of the function

    def visit_Nonlocal(self, node: ast.Nonlocal) -> Any:
        return at_line_of(ast.Pass(), node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        # An annotation of a local name has no effect, and forbids `nonlocal`.
        if node.value is None:
            return at_line_of(ast.Pass(), node)
        assign = at_line_of(ast.Assign([node.target], node.value), node)
        return self.generic_visit(assign)

    # --- statements -------------------------------------------------------------------

    def visit_If(self, node: ast.If) -> Any:
        parts = [*node.body, *node.orelse]
        if reason := self.obstacle(parts):
            return self.plain(node, reason)
        changed = self.changed(*parts)
        results = sorted(changed & getattr(node, AFTER))
        names = sorted(changed & (getattr(node, HEAD) | getattr(node, AFTER)))
        grows = self.grown(parts, changed)
        # These analyse the user's code, before `function` rewrites it.
        updates = _texts(sorted(updated(*parts)))
        containers = self.containers(parts, grows)
        name = self.name()
        then = self.function(node, f"{name}then", node.body)
        otherwise = self.function(node, f"{name}else", node.orelse)
        state = self.state(node, f"{name}state", [*names, *grows])
        functions = [then, otherwise, state]
        args = [self.visit(node.test), *(_read(f.name) for f in functions)]
        args += [_texts(names), _texts(grows), containers]
        captured = _texts(sorted({*names} & getattr(node, CAPTURED)))
        if hasattr(node, TAIL):
            statement: ast.stmt = ast.Return(_call("if_return", *args))
        else:
            call = _call("if_", *args, captured, _texts(results), updates)
            statement = ast.Expr(call)
        return [*functions, at_line_of(statement, node)]

    def visit_While(self, node: ast.While) -> Any:
        if reason := self.obstacle([*node.body, ast.Expr(node.test)]):
            return self.plain(node, reason)
        by_test = self.changed(ast.Expr(node.test))
        names = sorted((self.changed(*node.body) | by_test) & getattr(node, HEAD))
        captured = _texts(sorted({*names} & getattr(node, CAPTURED)))
        name = self.name()
        updates = _texts(sorted(updated(*node.body)))
        containers = self.containers(node.body)
        by_walrus = assigned(ast.Expr(node.test))
        test = self.visit(node.test)
        if flag := getattr(node, BROKEN, None):
            test = _call("and_", _call("not_", _read(flag)), _lambda(test))
        check = _define(f"{name}test", [], [ast.Return(test)])
        check.body[:0] = self.declarations(by_walrus)
        body = self.function(node, f"{name}body", node.body)
        state = self.state(node, f"{name}state", names)
        functions = [at_line_of(check, node), body, state]
        call = _call(
            "while_",
            *(_read(f.name) for f in functions),
            _texts(names),
            captured,
            containers,
            updates,
            ast.Constant(bool(by_test)),
        )
        return [*functions, at_line_of(ast.Expr(call), node)]

    def visit_For(self, node: ast.For) -> Any:
        if reason := self.obstacle([*node.body, ast.Expr(node.target)]):
            return self.plain(node, reason)
        targets = assigned(node.target)
        changed = self.changed(*node.body) | targets
        names = sorted(changed & getattr(node, HEAD))
        captured = _texts(sorted(changed & getattr(node, CAPTURED)))
        name = self.name()
        item = f"{name}item"
        first = at_line_of(ast.Assign([node.target], _read(item)), node)
        updates = updated(*node.body) - targets
        grows = self.grown(node.body, changed)
        containers = self.containers(node.body, grows)
        items = self.visit(node.iter)
        body = self.function(node, f"{name}body", [first, *node.body], item)
        state = self.state(node, f"{name}state", [*names, *grows])
        flag = getattr(node, BROKEN, None)
        if flag not in names:  # no path sets it and continues
            flag = None
        call = _call(
            "for_",
            items,
            _read(body.name),
            _read(state.name),
            _texts(names),
            captured,
            _texts(grows),
            containers,
            _texts(sorted(updates)),
            _constant(None)
            if flag is None
            else _tuple([_text(flag), _lambda(_read(flag))]),
            _texts(sorted(targets)),
        )
        return [body, state, at_line_of(ast.Expr(call), node)]

    def visit_AsyncFor(self, node: ast.AsyncFor) -> Any:
        return self.plain(node, "it is asynchronous")

    def visit_Match(self, node: ast.Match) -> Any:
        self.generic_visit(node)
        patterns = (n for case in node.cases for n in ast.walk(case.pattern))
        if any(isinstance(n, ast.MatchValue | ast.MatchSingleton) for n in patterns):
            node.subject = at_line_of(_call("plain_subject", node.subject), node)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        target = node.target
        evaluations: list[ast.stmt] = []
        if not isinstance(target, ast.Name):
            if any(isinstance(n, _YIELDS) for n in ast.walk(node.value)):
                return self.generic_visit(node)
            target, evaluations = self.evaluated_once(target, node)
        loaded = _loaded(target)
        op = _text(type(node.op).__name__)
        call = _call("augmented", op, loaded, self.visit(node.value))
        assignment = at_line_of(ast.Assign([target], call), node)
        return [*evaluations, assignment] if evaluations else assignment

    def evaluated_once(
        self, target: ast.Attribute | ast.Subscript, where: ast.stmt
    ) -> tuple[ast.Attribute | ast.Subscript, list[ast.stmt]]:
        """Return a target with names for its parts, and the statements that evaluate
        these parts once."""
        name = self.name()
        parts = {f"{name}of": self.visit(target.value)}
        if isinstance(target, ast.Subscript):
            parts[f"{name}at"] = _sliced(self.visit(target.slice))
            index = _read(f"{name}at")
            new_target: Any = ast.Subscript(_read(f"{name}of"), index, ast.Store())
        else:
            new_target = ast.Attribute(_read(f"{name}of"), target.attr, ast.Store())
        evaluations: list[ast.stmt] = [
            at_line_of(ast.Assign([ast.Name(n, ast.Store())], value), where)
            for n, value in parts.items()
        ]
        return new_target, evaluations

    def visit_Assert(self, node: ast.Assert) -> Any:
        parts = [node.test, *([node.msg] if node.msg else [])]
        if self.expression_obstacle(*parts[1:]):
            return self.generic_visit(node)
        message = self.visit(node.msg) if node.msg else ast.Constant(None)
        call = _call("assert_", self.visit(node.test), _lambda(message))
        return at_line_of(ast.Expr(call), node)

    # --- code that is not rewritten ---------------------------------------------------

    def obstacle(self, block: Sequence[ast.stmt]) -> str | None:
        """Return why a block cannot be rewritten; None: it can be."""
        if any(isinstance(statement, ast.Raise) for statement in block):
            return "a `raise` stands in it; use `hf.check`"
        if names := sorted(assigned(*block) & self.outer):
            return f"it assigns `{names[0]}`, which is global or nonlocal"
        for called in sorted(reads(*block) & self.writing_outside.keys()):
            return self.writer(called, self.writing_outside[called])
        for n in (n for statement in block for n in walk_scope(statement)):
            if isinstance(n, ast.Attribute) and not isinstance(n.ctx, ast.Load):
                text = ast.unparse(n)
                return f"it assigns `{text}`; assign a local name, and `{text}` after"
            if isinstance(n, _YIELDS):
                kind = "yield" if isinstance(n, ast.Yield | ast.YieldFrom) else "await"
                return f"a `{kind}` stands in it"
            if (
                isinstance(n, ast.Call)
                and isinstance(n.func, ast.Name)
                and n.func.id in _FRAMES
                and not n.args
            ):
                return f"it calls `{n.func.id}`, which looks at the names around it"
        return None

    def writer(self, called: str, name: str) -> str:
        """Return the reason for a call of a function that assigns a name outside."""
        return (
            f"`{called}`, which it calls, assigns `{name}`, which is global or "
            f"nonlocal; return what `{name}` becomes"
        )

    def expression_obstacle(self, *parts: ast.expr) -> str | None:
        """Return why an expression whose `parts` are evaluated conditionally cannot be
        rewritten; None: it can be."""
        for n in (n for part in parts for n in ast.walk(part)):
            if isinstance(n, _EXPRESSIONS):
                reason = "it assigns a name"
                return reason if isinstance(n, ast.NamedExpr) else "it waits or yields"
        for called in sorted(reads(*parts) & self.writing.keys()):
            return self.writer(called, self.writing[called])
        return None

    def plain(self, node: ast.If | Loop, reason: str) -> ast.stmt:
        """Return a statement that remains Python, and checks its conditions."""
        flag = getattr(node, BROKEN, None)
        self.generic_visit(node)
        if isinstance(node, ast.For):
            node.iter = _call("plain_items", node.iter, _text(reason))
        elif not isinstance(node, ast.AsyncFor):
            node.test = _plain(node.test, type(node).__name__.lower(), reason)
        if flag is not None:
            ends = ast.If(_plain(_read(flag), "break", reason), [ast.Break()], [])
            node.body.append(ends)
        return at_line_of(node, node)

    def visit_Name(self, node: ast.Name) -> Any:
        if node.id == RESULT and isinstance(node.ctx, ast.Load):
            # It is unbound if nothing has returned, maybe unknown until run time.
            return at_line_of(_call("load", _lambda(node)), node)
        return node

    # --- expressions ------------------------------------------------------------------

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        name = "and_" if isinstance(node.op, ast.And) else "or_"
        if reason := self.expression_obstacle(*node.values[1:]):
            self.generic_visit(node)
            kind = name.removesuffix("_")
            node.values[:-1] = [_plain(v, kind, reason) for v in node.values[:-1]]
            return at_line_of(node, node)
        if node not in self.predicates:
            name += "value"
        *others, result = [self.visit(value) for value in node.values]
        for value in reversed(others):
            result = _call(name, value, _lambda(result))
        return at_line_of(result, node)

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
        return at_line_of(_call("if_value", test, _lambda(body), _lambda(orelse)), node)

    def visit_Compare(self, node: ast.Compare) -> Any:
        if len(node.ops) == 1:
            self.generic_visit(node)
            comparison = self.compared(node.ops[0], node.left, node.comparators[0])
            return at_line_of(comparison, node)
        if self.expression_obstacle(*node.comparators):
            return self.generic_visit(node)
        pairs: list[ast.expr] = []
        for op, value in zip(node.ops, node.comparators, strict=True):
            link = self.compared(op, _read("x"), _read("y"))
            pairs += [_lambda(link, "x", "y"), _lambda(self.visit(value))]
        return at_line_of(_call("compare", self.visit(node.left), *pairs), node)

    def compared(self, op: ast.cmpop, x: ast.expr, y: ast.expr) -> ast.expr:
        """Return the comparison of two expressions."""
        if isinstance(op, ast.In | ast.NotIn):
            membership = _call("contains", x, y)
            return (
                _call("not_", membership) if isinstance(op, ast.NotIn) else membership
            )
        return ast.Compare(x, [op], [y])

    def visit_Call(self, node: ast.Call) -> Any:
        is_super = isinstance(node.func, ast.Name) and node.func.id == "super"
        if node.args and not node.keywords and (call := self.consumed(node)):
            return at_line_of(call, node)
        self.generic_visit(node)
        if is_super and self.first and not node.args:  # it reads its caller's frame
            node.args = [_read("__class__"), _read(self.first)]
        elif not is_super:
            node.func = _call("called", node.func)
        return at_line_of(node, node)

    # --- comprehensions ---------------------------------------------------------------

    def visit_ListComp(self, node: ast.ListComp) -> Any:
        arguments = self.as_function(node, "list")
        return (
            self.in_own_scope(node)
            if arguments is None
            else _call("list_of", *arguments)
        )

    def visit_SetComp(self, node: ast.SetComp) -> Any:
        return self.in_own_scope(node)

    def visit_DictComp(self, node: ast.DictComp) -> Any:
        return self.in_own_scope(node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> Any:
        return self.in_own_scope(node)

    def in_own_scope(self, node: _Comprehension) -> Any:
        """Return a comprehension that remains one, over which Python iterates."""
        first = node.generators[0]
        first.iter = self.visit(first.iter)
        items, first.iter = first.iter, ast.Constant(None)
        was_nested, self.nested = self.nested, True
        self.generic_visit(node)
        self.nested = was_nested
        first.iter = items
        return node

    def consumed(self, node: ast.Call) -> Any:
        """Return the rewritten call of a function on a generator expression and at most
        one more argument; None: it is another call."""
        [generator, *more] = node.args
        if not isinstance(generator, ast.GeneratorExp) or len(more) > 1:
            return None
        name = node.func.id if isinstance(node.func, ast.Name) else "list"
        kind = name if name in CONSUMERS else "list"
        arguments = self.as_function(generator, kind)
        if arguments is None:
            return None
        others = [self.visit(value) for value in more]
        return _call(
            "consumed", self.visit(node.func), _text(kind), *arguments, *others
        )

    def as_function(
        self, node: ast.ListComp | ast.GeneratorExp, kind: str
    ) -> list[ast.expr] | None:
        """Return the items of a comprehension, a lambda of the comprehension over given
        items, and a function with a loop over given items. None: it cannot be
        rewritten."""
        is_async = any(g.is_async for g in node.generators)
        parts = [*ast.walk(node)]
        if self.nested or is_async or any(isinstance(n, _EXPRESSIONS) for n in parts):
            return None
        name = f"{self.name()}{kind}"
        function = as_loop(deepcopy(node), name, kind)
        rewritten(at_line_of(function, node), self.writing, self.names)
        self.before.append(function)
        items = self.visit(node.generators[0].iter)
        node.generators[0].iter = ast.Constant(None)
        as_python = self.in_own_scope(node)
        node.generators[0].iter = _read("hopflow_items")
        return [items, _lambda(as_python, "hopflow_items"), _read(name)]

    # --- generated functions ----------------------------------------------------------

    def name(self) -> str:
        """Return a new prefix for names of generated functions."""
        self.count += 1
        return f"hopflow_{self.count}_"

    def visit(self, node: ast.AST) -> Any:
        """Return the rewritten node; for a statement, with the generated functions that
        it calls before it."""
        if not isinstance(node, ast.stmt):
            return super().visit(node)
        outer_functions, self.before = self.before, []
        rewritten_node = super().visit(node)
        statements = [
            *self.before,
            *(rewritten_node if isinstance(rewritten_node, list) else [rewritten_node]),
        ]
        self.before = outer_functions
        return statements

    def changed(self, *block: ast.stmt) -> set[str]:
        """Return the names that a block may assign, also by functions it calls."""
        calls = any(isinstance(n, ast.Call) for s in block for n in ast.walk(s))
        names = assigned(*block) | (self.shared if calls else set())
        return names - self.outer - self.globals

    def function(
        self, node: ast.stmt, name: str, body: Sequence[ast.stmt], *params: str
    ) -> ast.FunctionDef:
        """Return a rewritten block as a function."""
        names = assigned(*body)
        statements = self.block(body) or [ast.Pass()]
        function = _define(name, params, [*self.declarations(names), *statements])
        return at_line_of(function, node)

    def grown(self, block: Sequence[ast.stmt], changed: set[str]) -> list[str]:
        """Return the names of lists that a block only appends to."""
        candidates = self.names - self.outer - self.globals - self.shared - changed
        return sorted(appended_only(block) & candidates)

    def declarations(self, names: Iterable[str]) -> list[ast.stmt]:
        """Return the declarations of the user's names in a generated function."""
        inside = {*names} - self.globals
        self.moved |= inside
        return _declarations({*names} & self.globals, inside)

    def state(self, node: ast.stmt, name: str, names: Sequence[str]) -> ast.FunctionDef:
        """Return a function that returns the values of names, or assigns its argument
        to them; see `State`."""
        body: list[ast.stmt] = []
        if names:
            body += self.declarations(names)
            target = ast.Tuple([ast.Name(n, ast.Store()) for n in names], ast.Store())
            has_values = ast.Compare(
                _read("hopflow_values"), [ast.IsNot()], [_constant(None)]
            )
            assignments: list[ast.stmt] = [
                ast.Assign([target], _read("hopflow_values"))
            ]
            for n in names:
                unbound = ast.Compare(_read(n), [ast.Is()], [_runtime("UNBOUND")])
                delete = ast.Delete([ast.Name(n, ast.Del())])
                assignments.append(ast.If(unbound, [delete], []))
            body.append(ast.If(has_values, assignments, []))
        loads = _tuple(_call("load", _lambda(_read(n))) for n in names)
        function = _define(name, ["hopflow_values"], [*body, ast.Return(loads)])
        function.args.defaults = [_constant(None)]
        return at_line_of(function, node)

    def containers(
        self, block: Sequence[ast.stmt], but: Iterable[str] = ()
    ) -> ast.expr:
        """Return a function that returns the containers from outside which a block
        changes, with the user's expressions; a constant None if there are none."""
        texts = sorted(changed_containers(block) - {*but})
        if not texts:
            return _constant(None)
        values = [ast.parse(text, mode="eval").body for text in texts]
        pairs = [
            _tuple([_text(text), _call("load", _lambda(value))])
            for text, value in zip(texts, values, strict=True)
        ]
        return _lambda(_tuple(pairs))


def _is_async_generator(function: Scope) -> bool:
    yields = (ast.Yield, ast.YieldFrom)
    nodes = (n for statement in function.body for n in walk_scope(statement))
    is_async = isinstance(function, ast.AsyncFunctionDef)
    return is_async and any(isinstance(n, yields) for n in nodes)


# --- construction of nodes ------------------------------------------------------------


def _declarations(globals_: Iterable[str], nonlocals: Iterable[str]) -> list[ast.stmt]:
    statements: list[ast.stmt] = []
    if names := sorted(globals_):
        statements.append(ast.Global(names))
    if names := sorted(nonlocals):
        statements.append(ast.Nonlocal(names))
    return statements


def _plain(test: ast.expr, kind: str, reason: str) -> ast.expr:
    return _call("plain", test, _text(kind), _text(reason))


def _loaded(target: ast.expr) -> ast.expr:
    """Return the expression that reads the target of an assignment."""
    loaded = deepcopy(target)
    loaded.ctx = ast.Load()  # type: ignore[attr-defined]
    return loaded


def _sliced(index: ast.expr) -> ast.expr:
    """Return an index as an expression, in which slices are calls."""
    if isinstance(index, ast.Slice):
        parts = (index.lower, index.upper, index.step)
        return _call("slice", *(_constant(None) if p is None else p for p in parts))
    if isinstance(index, ast.Tuple):
        return ast.Tuple([_sliced(part) for part in index.elts], ast.Load())
    return index


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
    template = ast.parse(f"lambda {', '.join(params)}: 0", mode="eval").body
    assert isinstance(template, ast.Lambda)
    unplace(template.args)
    return ast.Lambda(template.args, body)


def _tuple(items: Iterable[ast.expr]) -> ast.expr:
    return ast.Tuple(list(items), ast.Load())


def _constant(value: None) -> ast.expr:
    return ast.Constant(value)


def _text(text: str) -> ast.expr:
    return ast.Constant(text)


def _texts(names: Iterable[str]) -> ast.expr:
    return _tuple(map(_text, names))
