"""`hf.trace`: capture a function as a `GraphModule` by running it on traced tensors."""

import contextlib
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from hopflow import pytree
from hopflow.bind import Operand, Value, current, run_graph, using
from hopflow.dtypes import as_dtype
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    ResultTypeError,
)
from hopflow.graph.core import Constant, Graph, SourceLine, Var
from hopflow.graph.interpreter import Evaluate
from hopflow.graph.module import GraphModule, Specialization
from hopflow.graph.printer import format_graph
from hopflow.graph.rewriting import read_vars
from hopflow.graph.types import FLOAT_TYPE, TensorType
from hopflow.logs import log
from hopflow.ops.convert import apply, as_value, copy
from hopflow.ops.opdef import as_operand
from hopflow.ops.rules import as_flag
from hopflow.pytree import Spec
from hopflow.recursion import deep_recursion
from hopflow.symbolic.boolean import SymBool
from hopflow.symbolic.guards import GuardSet
from hopflow.symbolic.size import Size, SymFloat, SymInt, symbol
from hopflow.tensor import asarray
from hopflow.trace.captures import hold_captures, is_written
from hopflow.trace.dims import Choice, Dynamic, LeafPlan, choice_of, plan_leaves
from hopflow.trace.functional import TracedTensor, aliased_write
from hopflow.trace.inputs import Inputs
from hopflow.trace.marks import marks_of
from hopflow.trace.purity import Watch, check_same
from hopflow.trace.source import (
    argument_texts,
    check_arity,
    closed_over,
    input_names,
    literals,
    name_of,
    parameter_names,
    user_env,
    where,
)
from hopflow.trace.state import name_captures
from hopflow.trace.tracer import Tracer, share_memory, trace_into
from hopflow.trace.values import ValueTracer

_MODES: Final = ("real", "fake", "symbolic")


def trace(
    f: Callable[..., Any],
    *args: Any,
    mode: str = "real",
    strict: bool = False,
    captures: bool = False,
    dynamic: Dynamic = True,
    runtime_asserts: bool = True,
) -> GraphModule:
    """Capture `f(*args)` as a graph, a function of the tensors among `args`.

    `f` runs once, as Python; loops over sizes and iteration over tensors are unrolled.
    Arguments that are no tensors are constants of the graph, which
    `GraphModule.specializations` lists. Each call repeats the writes to arguments; an
    argument that is written must not alias another one.

        >>> module = hf.trace(lambda x: 2 * x + 1, hf.ones(3))
        >>> module(hf.asarray([1.0, 2.0, 3.0])).tolist()
        [3.0, 5.0, 7.0]

    Args:
        f: Takes and returns pytrees of tensors and numbers.
        args: Pytrees of tensors; in mode "fake" also of types (see `spec`).
        mode: "real" takes tensors and knows their values: a value that Python needs
            (`if x > 0`, `float(x)`) outside the bodies of operators is computed, and
            the graph checks in each run that it is the same. "fake" uses only types,
            and sizes in types may be symbols: the graph is then for all sizes.
            "symbolic" makes symbols of the sizes and numbers among `args`; decisions of
            `f` by their values are the module's `guards`, which each call checks.
        strict: Whether to trace twice, and to detect side effects of `f`: on reachable
            objects, streams, logs, files, random number generators.
        captures: Whether `f` may read tensors that are no arguments; they become
            attributes of the graph.
        dynamic: In mode "symbolic": True for all sizes and numbers, or for each
            argument (a sequence, or a mapping by name) True, None or False for a
            constant, an `hf.Dim`, or a mapping or sequence of these by axis; in
            containers of the argument's structure.
        runtime_asserts: In mode "symbolic" the guards are ranges, linear equalities and
            divisibilities; other decisions are checked by the graph when it runs, or
            not at all if this is False.

    Raises:
        ArgumentTypeError: `f` is not callable, or a type is passed in mode "real", or
            `dynamic` is of another kind.
        ArgumentValueError: an unknown mode; or `dynamic` does not fit `args`, or they
            do not fit a declared `Dim`.
        CapturedTensorError: `f` reads a tensor from outside, without `captures`.
        ImpurityError: with `strict`, `f` prints, logs, writes to a file, draws random
            numbers, changes earlier state (a global, a list, `os.environ`), or has
            another graph the second time.
        ResultTypeError: `f` returns something that is no tensor or number.
        TraceError: `f` needs a value that is known only at run time: in modes other
            than "real", in the body of an operator, or of a callback's result.
    """
    if not callable(f):
        raise ArgumentTypeError(
            f"trace: `f` must be a function, and is `{type(f).__name__}`."
        )
    as_flag("trace", "captures", captures)
    if not isinstance(mode, str) or mode not in _MODES:
        raise ArgumentValueError(
            f"trace: `mode` must be 'real', 'fake' or 'symbolic', and is {mode!r}."
        )
    check_arity("trace", f, args)
    as_flag("trace", "runtime_asserts", runtime_asserts)
    names = parameter_names(f, len(args))
    plans: Sequence[LeafPlan] | None = None
    if mode == "symbolic":
        plans = plan_leaves("trace", dynamic, args, names)
    return captured(
        "trace",
        f,
        args,
        names,
        mode=mode,
        plans=plans,
        strict=as_flag("trace", "strict", strict),
        captures=captures,
        runtime_asserts=runtime_asserts,
    )


def captured(
    name: str,
    f: Callable[..., Any],
    args: tuple[Any, ...],
    names: Sequence[str],
    *,
    mode: str,
    plans: Sequence[LeafPlan] | None = None,
    strict: bool = False,
    captures: bool = True,
    runtime_asserts: bool = True,
    keep_guards: bool = False,
) -> GraphModule:
    """The graph of `f(*args)`, for the public function `name`; see `trace`.

    Args:
        names: Of the parameters, one for each of `args`.
        plans: In mode "symbolic", what is to be a symbol, for each leaf of `args`.
        keep_guards: Whether the module has those guards too that its graph checks.

    Raises:
        HopflowError: as `trace` does.
    """

    @deep_recursion()
    def module(watch: Watch | None = None) -> GraphModule:
        capture = _Capture(
            *(name, f, args, names, mode, plans), allow_captures=captures, watch=watch
        )
        return capture.module(runtime_asserts=runtime_asserts, keep_guards=keep_guards)

    return _strictly(f, args, module) if strict else module()


def _strictly(
    f: Callable[..., Any], args: tuple[Any, ...], module: Callable[..., GraphModule]
) -> GraphModule:
    """Return the module of a strict trace: it is watched, and made twice.

    Raises:
        ImpurityError: see `trace`.
    """
    watch = Watch(f, args)
    with watch.watching():
        result = module(watch)
    with contextlib.redirect_stdout(io.StringIO()):
        check_same(f, result.graph, module().graph)
    return result


@dataclass(frozen=True, slots=True)
class Run:
    """Runs a captured graph, and writes the tensors that the function wrote.

    results   the number of outputs that are results; the others are written values
    written   the targets of these: operands (by position) and attributes (by name)
    same      position of a result -> position of the written operand that it is
    numbers   the positions of results that were Python numbers
    """

    results: int
    written: tuple[int | str, ...]
    same: dict[int, int]
    numbers: frozenset[int]

    def __call__(
        self, graph: Graph, args: Sequence[Any], evaluate: Evaluate = run_graph
    ) -> list[Any]:
        sizes = current().value_of
        args = [sizes(a) if isinstance(a, SymInt) else a for a in args]
        operands = args[len(args) - len(graph.operands) :]
        targets = [
            operands[k] if isinstance(k, int) else graph.attributes[k]
            for k in self.written
        ]
        if targets:
            _check_apart(graph, operands, targets)
        outputs = evaluate(graph, args)
        for tensor, value in zip(targets, outputs[self.results :], strict=True):
            current().write(tensor, as_value(value))
        results: list[Any] = []
        for i, value in enumerate(outputs[: self.results]):
            if i in self.same:
                results.append(operands[self.same[i]])
            elif i in self.numbers:
                is_constant = isinstance(value, Constant)
                results.append(value.value if is_constant else value.item())
            else:
                results.append(as_value(value))
        return results


def _check_apart(
    graph: Graph, operands: Sequence[Value], targets: Sequence[Value]
) -> None:
    """Raises: MutationError: a tensor that a graph writes aliases another one that it
    reads or writes, which the graph assumes to be disjoint."""
    read, written = read_vars(graph), {id(x) for x in targets}
    pairs = zip(graph.operands, operands, strict=True)
    used = [x for var, x in pairs if var in read or id(x) in written]
    used += [x for x in graph.attributes.values() if isinstance(x, Value)]
    for target in targets:
        others = [x for x in used if x is not target]
        is_disjoint = not any(share_memory([target, x]) for x in others)
        if len(used) - len(others) > 1 or not is_disjoint:
            raise aliased_write(target.type)


class _Capture:
    """One capture of a function.

    specializations   position of a leaf -> the constant that it is in the graph
    vars              position of a leaf -> the input for the tensor
    operands          for each operand, the position of its leaf
    numbers           the positions of leaves that are symbols
    """

    def __init__(
        self,
        name: str,
        f: Callable[..., Any],
        args: tuple[Any, ...],
        names: Sequence[str],
        mode: str,
        plans: Sequence[LeafPlan] | None,
        *,
        allow_captures: bool,
        watch: Watch | None = None,
    ) -> None:
        self.name = name
        self.f = f
        self.watch = watch
        self.mode = mode
        self.leaves, self.in_spec = pytree.flatten(args)
        self.paths = pytree.leaf_paths(self.in_spec, "args")
        env = user_env() if mode == "symbolic" else None
        self.tracer = (
            ValueTracer(f, allow_captures=allow_captures)
            if mode == "real"
            else Tracer(None, name_of(f), allow_captures=allow_captures, env=env)
        )
        self.inputs = Inputs(
            name,
            self.tracer,
            self.leaves,
            argument_texts(names, self.in_spec.children()),
            lambda i, axis: self.choice(plans[i] if plans else False, i, axis),
        )
        if env is None:
            self.tracer.shape_lines = {}
        self.specializations: dict[int, Specialization] = {}
        self.vars: dict[int, Var] = {}
        self.operands: list[int] = []
        self.numbers: set[int] = set()

    def module(self, *, runtime_asserts: bool, keep_guards: bool) -> GraphModule:
        """Trace the function, and return its graph as a module; see `trace`."""
        outputs, out_spec, numbers = trace_into(
            self.tracer, lambda: self.flatten(self.run()), ()
        )
        tensors = self.tracer.operands
        written: list[int | str] = [i for i, t in enumerate(tensors) if is_written(t)]
        places = {id(t): i for i, t in enumerate(tensors) if is_written(t)}
        same = {i: places[id(o)] for i, o in enumerate(outputs) if id(o) in places}
        results = len(outputs)
        outputs = [self.with_memory(output) for output in outputs]
        outputs += [tensors[i] for i in written if isinstance(i, int)]
        for output in outputs:  # a tensor that is only returned becomes a capture
            if isinstance(output, Value):
                self.tracer.localize(output)
        names = self.attribute_names()
        for key, capture in self.tracer.captures.items():
            if capture.written and not self.tracer.is_adopted(capture.origin):
                written.append(names[key])
                outputs.append(capture.tensor)
        guards = self.guards(insert=runtime_asserts, keep=keep_guards)
        graph = self.tracer.close(outputs)
        self.hold_captures(graph, names)
        log("graph", lambda: format_graph(graph))
        return GraphModule(
            graph,
            self.in_spec,
            out_spec,
            run=Run(results, tuple(written), same, numbers),
            as_value=argument_value,
            specializations=self.located(graph),
            read=self.read(graph),
            numbers=self.numbers,
            sources=self.inputs.find_sources(),
            guards=guards,
            texts=self.inputs.texts,
            decided=0 if self.tracer.env is None else len(self.tracer.env.asked),
        )

    def with_memory(self, output: Operand) -> Operand:
        """Return an output of the graph that aliases no input: an element of a tensor,
        which the interpreter would return as a view, is copied."""
        if not isinstance(output, TracedTensor) or output.tracer is not self.tracer:
            return output
        if output.chain or getattr(output.source.node.op, "unview", None) is None:
            return output
        with using(self.tracer):
            return apply(copy, output)

    # --- arguments ---

    def choice(self, plan: LeafPlan, i: int, axis: int | None) -> Choice:
        """Return whether a size or number of an argument is a symbol or a constant."""
        chosen = choice_of(plan, axis)
        if axis is not None and chosen in (None, True):
            chosen = marks_of(self.leaves[i]).get(axis, chosen)
        return chosen or False

    def run(self) -> Any:
        """Call the function on traced arguments, and return its result."""
        names = iter(input_names(self.f, self.in_spec.children()))
        inputs = [self.input(i, next(names)) for i in range(len(self.leaves))]
        args = pytree.unflatten(self.in_spec, inputs)
        if self.watch is not None:
            self.watch.watch_arguments(parameter_names(self.f, len(args)), args)
        return self.f(*args)

    def input(self, i: int, name: str) -> Any:
        """Return what `f` gets for a leaf of its arguments."""
        leaf = self.leaves[i]
        self.operands.append(i)
        if isinstance(leaf, TensorType):
            if self.mode == "real":
                raise ArgumentTypeError(
                    f"{self.name}: `{self.paths[i]}` is a type ({leaf}), which mode "
                    "'real' does not take. Give a tensor, or use mode 'fake'."
                )
            return self.tensor(i, leaf, name)
        if isinstance(leaf, Value | np.ndarray | np.generic):
            operand = as_operand(self.name, i, leaf)
            self.leaves[i] = operand
            tensor = self.tensor(i, operand.type, name)
            if isinstance(self.tracer, ValueTracer):
                self.tracer.values[self.vars[i]] = operand
            return tensor
        number = self.inputs.number(i, name)
        if isinstance(number, SymFloat):
            return number
        self.operands.pop()
        if number is leaf:
            self.specializations[i] = Specialization(self.paths[i], leaf)
        elif isinstance(number, int | SymInt):
            self.numbers.add(i)
        return number

    def tensor(self, i: int, type_: TensorType, name: str) -> Value:
        """Return a new operand for a leaf."""
        tensor = self.inputs.tensor(i, type_, name)
        self.vars[i] = self.tracer.operands[-1].source
        return tensor

    def shapes(self) -> dict[int | str, Specialization]:
        """Return the shapes that the function read, which are constants: of arguments
        by position, of intermediate tensors by the line."""
        paths = {var: (i, self.paths[i]) for i, var in self.vars.items()}
        constants: dict[int | str, Specialization] = {}
        for var, line in (self.tracer.shape_lines or {}).items():
            key, path = paths.get(var, (f"shape at {line}", f"{var.type}"))
            constants[key] = Specialization(f"{path}.shape", var.type.shape, line)
        return constants

    def located(self, graph: Graph) -> dict[int, Specialization]:
        """Return the arguments that are constants; numbers with the line that uses
        them."""
        return {
            i: replace(s, line=self.line_of(graph, s.value))
            for i, s in self.specializations.items()
        }

    def read(self, graph: Graph) -> dict[int | str, Specialization]:
        """Return the constants of the graph that are no arguments: shapes, numbers from
        enclosing scopes by name, and others, such as attributes, by line."""
        constants = {**self.shapes(), **self.outer(graph)}
        if isinstance(self.tracer, ValueTracer):
            constants.update(self.tracer.asked_values)
        named = [*self.specializations.values(), *constants.values()]
        listed = {s.value for s in named if type(s.value) in _NUMBERS}
        used = {
            (arg.value, node.line): None
            for node in graph.distinct_nodes()
            for arg in node.args
            if isinstance(arg, Constant) and node.line is not None
        }
        for value, line in used:
            if value not in listed and value not in literals(line):
                text = repr(value)
                constants[f"{text} at {line}"] = Specialization(text, value, line)
        return constants

    def outer(self, graph: Graph) -> dict[int | str, Specialization]:
        """Return the numbers that the function reads from enclosing scopes, by name."""
        return {
            name: Specialization(name, value, self.line_of(graph, value))
            for name, value in closed_over(self.f).items()
            if type(value) in (bool, int, float)
        }

    def line_of(self, graph: Graph, value: Any) -> SourceLine | None:
        """Return the line of the first node that has a number as an argument."""
        if type(value) not in _NUMBERS:
            return None
        for node in graph.distinct_nodes():
            if any(isinstance(a, Constant) and a.value == value for a in node.args):
                return node.line
        return None

    def guards(self, *, insert: bool, keep: bool) -> GuardSet:
        """Return the guards that calls check: the simple ones, or all if `keep`; if
        `insert`, add nodes to the graph that check the others."""
        env = self.tracer.env
        if env is None:
            return GuardSet()
        all_guards = env.guards.simplified().guards
        for guard in all_guards if insert else ():
            if not guard.is_simple:
                at = f" ({guard.line})" if guard.line else ""
                text = env.describe(guard.holds)
                message = f"{name_of(self.f)}: `{text}`{at} no longer holds"
                trace_into(
                    self.tracer, self.tracer.insert_check, (guard.holds, message)
                )
        return GuardSet(tuple(g for g in all_guards if keep or g.is_simple))

    # --- results ---

    def flatten(self, tree: Any) -> tuple[list[Operand], Spec, frozenset[int]]:
        """Return the leaves of the result as operands, its structure, and the positions
        of Python numbers."""
        leaves, out_spec = pytree.flatten(tree)
        outputs: list[Operand] = []
        numbers: set[int] = set()
        for i, leaf in enumerate(leaves):
            try:
                outputs.append(as_operand(self.name, i, leaf))
            except ArgumentTypeError:
                path = pytree.leaf_paths(out_spec, "result")[i]
                raise ResultTypeError(
                    f"{self.name}: `{name_of(self.f)}` ({where(self.f) or 'f'}) must "
                    f"return tensors or numbers, and its `{path}` is "
                    f"`{type(leaf).__name__}`. Return the data alone, or None."
                ) from None
            if type(leaf) in _NUMBERS:
                numbers.add(i)
        return outputs, out_spec, frozenset(numbers)

    # --- captured tensors ---

    def attribute_names(self) -> dict[Any, str]:
        """Return the names of captured tensors, by the captures' keys."""
        name_captures(self.f, self.tracer)
        return {k: c.input.node.name for k, c in self.tracer.captures.items()}

    def hold_captures(self, graph: Graph, names: dict[Any, str]) -> None:
        """Turn inputs for captured tensors into attributes of the graph."""
        read = read_vars(graph)
        captures = self.tracer.captures.items()
        attributes = [
            (c.input, names[k], c.origin) for k, c in captures if c.input in read
        ]
        graph.inputs = [v for v in graph.inputs if v.node.section in _INPUTS]
        hold_captures(graph, attributes)


def argument_value(leaf: Any) -> Value:
    """Return an argument of a module as a value; a Python float becomes f64."""
    if isinstance(leaf, SymFloat):
        return current().value_of(leaf)
    return asarray(leaf, dtype=FLOAT_TYPE.dtype if type(leaf) is float else None)


_INPUTS: Final = ("symbol", "operand")
_NUMBERS: Final = (bool, int, float, SymBool, SymInt, SymFloat)


# --- types as text --------------------------------------------------------------------

_TYPE: Final = re.compile(r"\s*(\w+)\s*\[([^\[\]]*)\]\s*")


def spec(*texts: str) -> Any:
    """Parse tensor types, written as they are printed.

        >>> matrix, vector = hf.spec("f32[n, 4]", "i64[n]")
        >>> print(matrix)
        f32[n, 4]

    Args:
        texts: Each has a dtype and sizes: numbers, or names of symbols. A name is the
            same symbol in all texts.

    Returns:
        The type; for several texts, the tuple of their types.

    Raises:
        ArgumentTypeError: a text is no string.
        ArgumentValueError: a text is no type.
        DTypeError: there is no such dtype.
    """
    for text in texts:
        if not isinstance(text, str):
            raise ArgumentTypeError(
                'spec: `texts` must be strings such as "f32[n, 4]", and one is '
                f"`{type(text).__name__}`."
            )
    names: dict[str, SymInt] = {}
    types = tuple(_parse(text, names) for text in texts)
    return types[0] if len(types) == 1 else types


DIGITS: Final = 18
"""Decimal digits of a size that always fits int64."""


def _parse(text: str, names: dict[str, SymInt]) -> TensorType:
    matched = _TYPE.fullmatch(text)
    sizes: list[Size] = []
    parts = [p.strip() for p in matched[2].split(",")] if matched else [""]
    for part in parts if parts != [""] else []:
        if part.isdecimal() and len(part) <= DIGITS:
            sizes.append(int(part))
        elif part.isidentifier():
            if part not in names:
                names[part] = symbol(part)
            sizes.append(names[part])
        else:
            matched = None
    if matched is None:
        raise ArgumentValueError(
            f"spec: {text!r} is no type. Write a dtype and sizes, as in 'f32[n, 4]'."
        )
    return TensorType(as_dtype(matched[1]), tuple(sizes))
