"""`ExportedProgram`: a captured function that leaves the process that made it."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from hopflow import pytree
from hopflow.compiler.passes.expand import expand_inlines
from hopflow.entries import entry
from hopflow.errors import ArgumentTypeError, ArgumentValueError, StructureError
from hopflow.export.diff import Difference, differences
from hopflow.export.document import Document, structure_of, write_document
from hopflow.export.exported import Stateful
from hopflow.export.files import write_file
from hopflow.export.jax.frames import ASSERTS as JAX_ASSERTS
from hopflow.export.jax.frames import Asserts as JaxAsserts
from hopflow.export.jax.function import JaxFunction, to_artifact, to_function
from hopflow.export.native.build import NativeCode, to_native
from hopflow.export.native.parameters import c_name
from hopflow.export.native.targets import HOST, TARGETS
from hopflow.export.onnx.model import ASSERTS, Asserts, save_model, to_model
from hopflow.export.signature import Signature, signature_of
from hopflow.export.wasm.build import WasmCode, to_wasm
from hopflow.graph.core import Graph, SourceLine
from hopflow.graph.module import GraphModule
from hopflow.graph.rewriting import clone, eliminate_dead_code
from hopflow.ops.rules import one_of
from hopflow.recursion import deep_recursion
from hopflow.symbolic.facts import Facts
from hopflow.symbolic.terms import of_factor


class Assert(NamedTuple):
    """A condition that a run checks, and where the user's code relies on it."""

    message: str
    line: SourceLine | None

    def __str__(self) -> str:
        return f"{self.message}  ({self.line})" if self.line else self.message


class ExportedProgram(Stateful):
    """A function as data: a graph, the names and structures of what it takes, gives and
    holds, and what its sizes must fulfil.

    It is called as the function was, and is one to `hf.grad`, `hf.vmap`, `hf.jit` and
    `hf.export`. It is also a pytree of the tensors that it holds, so that
    `hf.grad(lambda program, x: loss(program(x)))(program, x)` is the derivative with
    respect to those.

    module   the captured function: its graph, as a function of positional arguments
    derivatives   how often, at least, functions with rules of their own may be
                  differentiated
    """

    def __init__(
        self,
        module: GraphModule,
        arguments: tuple[str, ...],
        positional: int,
        derivatives: int = 0,
    ) -> None:
        self.module = module
        self.arguments = arguments
        self.positional = positional
        self.derivatives = derivatives
        self.__name__ = module.graph.name
        self.__signature__ = _python_signature(arguments, positional)

    @entry
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program. Writes to arguments are seen by the caller.

        Raises:
            StructureError: arguments of other names or another structure.
            ShapeError, DTypeError: a tensor of another type.
            ArgumentValueError: another value than the program has for a constant.
            GuardError: a size breaks one of the `constraints`.
            CheckError: a condition that only the run knows does not hold.
        """
        try:
            bound = self.__signature__.bind(*args, **kwargs)
        except TypeError as error:
            raise StructureError(
                f"{self.__name__}: {error}. The program is called as "
                f"`{self.__name__}{self.__signature__}`."
            ) from None
        return self.module(*bound.arguments.values())

    # --- what it is ---

    @property
    def graph(self) -> Graph:
        """What it computes."""
        return self.module.graph

    @cached_property
    def signature(self) -> Signature:
        """What it takes, gives, holds and writes."""
        return signature_of(self.module, self.arguments, self.positional)

    @property
    def state(self) -> dict[str, Any]:
        """The tensors that it holds, by module path."""
        return self.graph.attributes

    @property
    def range_constraints(self) -> dict[str, tuple[float, float]]:
        """The least and the largest value of each symbol that arguments tell."""
        facts = Facts()
        for guard in self.module.guards.guards:
            facts.learn(guard.holds)
        ranges = {
            s: facts.range(of_factor(s)) for s in self.module.sources if not s.real
        }
        return {s.name: (found.low, found.high) for s, found in ranges.items()}

    @property
    def constraints(self) -> tuple[str, ...]:
        """What sizes and numbers of a call must fulfil, in the user's names."""
        guards = self.module.guards.guards
        return tuple([str(size_condition(guard)) for guard in guards])

    @property
    def asserts(self) -> tuple[Assert, ...]:
        """The conditions that a run checks, in order."""
        return tuple(
            Assert(str(node.params.get("message", "")), node.line)
            for node in self.graph.walk()
            if node.op is not None and node.op.name in ("check", "require")
        )

    @property
    def operators(self) -> dict[str, Any]:
        """The schema of every operator that the graph uses, by name."""
        return self._document().data["operators"]  # type: ignore[no-any-return]

    def print_readable(self, print_output: bool = True) -> str:
        """The graph as Python source, printed if `print_output`."""
        return self.module.print_readable(print_output)

    def __str__(self) -> str:
        return str(self.module)

    def __repr__(self) -> str:
        count = sum(1 for _ in self.graph.walk())
        return (
            f"<ExportedProgram {self.__name__}{self.__signature__}: {count} nodes, "
            f"{len(self.state)} tensors>"
        )

    # --- what it becomes ---

    @entry
    @deep_recursion()
    def decompose(self) -> "ExportedProgram":
        """The program in fewer operators: what stands for a graph (calls of subgraphs,
        checkpoints, functions with own derivatives, attention, associative scans) is
        that graph, in loops, branches and operations.

        Derivatives are then those of what is there: rules of one's own are gone.
        """
        graph = expand_inlines(clone(self.graph))
        eliminate_dead_code(graph)
        return self._with(graph)

    def _with(self, graph: Graph) -> "ExportedProgram":
        module = self.module.with_graph(graph)
        return type(self)(module, self.arguments, self.positional, self.derivatives)

    def with_state(self, state: Mapping[str, Any]) -> "ExportedProgram":
        """The program with other tensors of the same types in places of those that it
        holds.

        Raises:
            StructureError: a name is none of the state.
        """
        graph = copy(self.graph)
        graph.attributes = self._replaced(state)
        return self._with(graph)

    # --- comparing ---

    def _document(self, *, with_lines: bool = True) -> Document:
        return write_document(
            *(self.module, self.arguments, self.positional, self.derivatives),
            with_lines=with_lines,
        )

    def __eq__(self, other: object) -> bool:
        """Whether both have the same signature, constraints, graph and tensors, bit by
        bit. Source lines play no part."""
        if not isinstance(other, ExportedProgram):
            return NotImplemented
        if self is other:
            return True
        return structure_of(self._document(with_lines=False)) == structure_of(
            other._document(with_lines=False)
        ) and all(
            _same_bits(self.state[name], other.state[name]) for name in self.state
        )

    def __hash__(self) -> int:
        return hash((self.arguments, len(self.graph.nodes), *self.state))

    @entry
    def diff(self, other: "ExportedProgram") -> tuple[Difference, ...]:
        """Where `other` differs: in signature, constraints, nodes, tensors. An empty
        tuple: they are equal. Print it line by line.

        Raises:
            ArgumentTypeError: `other` is no program.
        """
        if not isinstance(other, ExportedProgram):
            raise ArgumentTypeError(
                "diff: `other` must be an ExportedProgram, and is "
                f"`{type(other).__name__}`."
            )
        found = differences(
            self._document(with_lines=False), other._document(with_lines=False)
        )
        both = [name for name in self.state if name in other.state]
        changed = [
            Difference("~", name, "the elements differ")
            for name in both
            if self.state[name].type == other.state[name].type
            and not _same_bits(self.state[name], other.state[name])
        ]
        return (*found, *changed)

    # --- files ---

    @entry
    @deep_recursion()
    def save(self, path: str | PathLike[str]) -> None:
        """Write a `.hopflow` file, which `hf.load` reads. The same program gives the
        same bytes. A file that is there is replaced once the new one is whole.

        Raises:
            ArgumentTypeError: `path` is no path.
            OSError: it cannot be written.
        """
        _check_path("save", path)
        write_file(path, self._document())

    # --- other formats ---

    @entry
    @deep_recursion()
    def to_onnx(
        self, path: str | PathLike[str] | None = None, *, asserts: Asserts = "outputs"
    ) -> Any:
        """The program as an ONNX model, which runs where Python is not.

        Loops and branches are operators in it, and symbolic sizes names. Its inputs
        and outputs have the names of the arguments and results: `params['w'][0]` is
        `params.w.0`. What a call writes is one more output each, `x.written`. See
        docs/export.md for what ONNX says in another way.

            >>> model = hf.export(hf.sin, (hf.ones((2,)),)).to_onnx()  # doctest: +SKIP
            >>> [node.op_type for node in model.graph.node]  # doctest: +SKIP
            ['Sin', 'Identity']

        Args:
            path: Where to write it, if it is given.
            asserts: What becomes of checks, for a model cannot stop. "outputs": the
                output `failed_check` is the number of the first one that has failed, in
                the list `hopflow.checks` of the metadata, or 0. "drop": nothing.
                "error": a program that has some is refused.

        Returns:
            The `onnx.ModelProto`, which the checker of `onnx` has accepted.

        Raises:
            ExportError: ONNX has nothing for an operation; the message names it and the
                user's line. Or the library `onnx` is missing.
            ArgumentTypeError, ArgumentValueError: an argument is of another kind.
            OSError: the file cannot be written.
        """
        if path is not None:
            _check_path("to_onnx", path)
        one_of("to_onnx", "asserts", asserts, ASSERTS)
        model = to_model(self, asserts)
        if path is not None:
            save_model(model, path)
        return model

    @entry
    @deep_recursion()
    def to_jax(self, *, asserts: JaxAsserts = "drop") -> JaxFunction:
        """The program as a function of JAX, with the same pytrees of `jax.Array`s.

        `jax.jit`, `jax.grad`, `jax.vmap` and `jax.shard_map` transform it; loops and
        branches are those of `jax.lax`. It is a pytree of the program's tensors. See
        `JaxFunction`, and docs/export.md for what JAX does in another way.

            >>> fn = hf.export(hf.sin, (hf.ones((2,)),)).to_jax()  # doctest: +SKIP
            >>> jax.jit(fn)(jax.numpy.zeros(2))  # doctest: +SKIP
            Array([0., 0.], dtype=float32)

        Args:
            asserts: What becomes of checks, for what JAX traces cannot stop. "drop":
                nothing. "checkify": each is a `jax.experimental.checkify.check`, which
                `checkify.checkify(fn)` makes an error value.

        Raises:
            ExportError: JAX has nothing for an operation, or cannot know a size when it
                traces; the message names it and the user's line. Or the library `jax`
                is missing, or makes no arrays of 64 bits.
            ArgumentValueError: `asserts` is another one.
        """
        one_of("to_jax", "asserts", asserts, JAX_ASSERTS)
        return to_function(self, asserts)

    @entry
    @deep_recursion()
    def to_stablehlo(
        self,
        path: str | PathLike[str] | None = None,
        *,
        platforms: Sequence[str] | None = None,
        derivatives: int = 0,
    ) -> bytes:
        """The program as a portable artifact, which `jax.export.deserialize` reads in
        another process, where hopflow need not be.

        It holds versioned StableHLO (`mlir_module_serialized` of what is read), and the
        program's tensors. Symbolic sizes are symbolic dimensions, of at least 1, with
        the program's constraints. An argument that is a constant of the program is None
        in a call. Checks are left out.

            >>> artifact = program.to_stablehlo("f.stablehlo")  # doctest: +SKIP
            >>> jax.export.deserialize(bytearray(artifact)).call(x)  # doctest: +SKIP

        Args:
            path: Where to write it, if it is given.
            platforms: What it is for: "cpu", "cuda", "rocm", "tpu". None: what JAX uses
                here.
            derivatives: How many orders of reverse derivatives it holds as well.

        Raises:
            ExportError: as `to_jax`; or JAX cannot do without the value of a size, or
                cannot write a container of the arguments or the result.
            ArgumentTypeError: `path` is no path.
            OSError: the file cannot be written.
        """
        if path is not None:
            _check_path("to_stablehlo", path)
        artifact = to_artifact(self, platforms, derivatives)
        if path is not None:
            Path(path).write_bytes(artifact)
        return artifact

    @entry
    @deep_recursion()
    def to_native(
        self,
        folder: str | PathLike[str],
        *,
        name: str | None = None,
        target: str = HOST,
    ) -> NativeCode:
        """The program as native code with a C header, which runs where Python is not.

        It is one C function, of the sizes, the arguments and the results, which
        allocates nothing and keeps no state. What the program holds is part of the
        code. See docs/export.md for the function and those beside it.

            >>> program = hf.export(scale, (x, 2.0))  # doctest: +SKIP
            >>> program.to_native("build").header.name  # doctest: +SKIP
            'scale.h'

        Args:
            folder: Where to write: `<name>.h`, the object code `<name>.o`, a shared
                library where a linker for the target is here (a C compiler of the
                system, or the package `ziglang`), `<name>Config.cmake` and `<name>.pc`.
            name: Of the C function and the files; None: that of the program.
            target: "host", which may use all that the CPU of this machine has;
                "x86-64-v2", "x86-64-v3", "x86-64-v4", "aarch64", "riscv64" and
                "riscv64-v" for Linux; "cortex-m7" for microcontrollers without a
                system.

        Returns:
            Where the files are.

        Raises:
            ExportError: native code cannot have an operation; the message names it and
                the user's line. Or linking fails.
            ArgumentTypeError, ArgumentValueError: an argument is of another kind, or
                `name` is no identifier of C, or means something else there.
            OSError: a file cannot be written.
        """
        _check_path("to_native", folder, "folder")
        one_of("to_native", "target", target, TARGETS)
        return to_native(self, folder, self._c_name("to_native", name), target)

    @entry
    @deep_recursion()
    def to_wasm(
        self, folder: str | PathLike[str], *, name: str | None = None
    ) -> WasmCode:
        """The program as WebAssembly, which runs in browsers and in Node.

        The module comes with a JavaScript module, `load` and `run` with typed arrays,
        with TypeScript declarations of that, and with a page that runs the program. See
        docs/export.md.

            >>> program = hf.export(scale, (x, 2.0))  # doctest: +SKIP
            >>> program.to_wasm("web").script.name  # doctest: +SKIP
            'scale.mjs'

        Args:
            folder: Where to write: `<name>.wasm`, `<name>.mjs`, `<name>.d.mts`,
                `index.html`.
            name: Of the program and the files; None: that of the program.

        Returns:
            Where the files are.

        Raises:
            ExportError: WebAssembly cannot have an operation; the message names it and
                the user's line. Or there is no linker here: `wasm-ld`, or the package
                `ziglang`; or it fails.
            ArgumentTypeError, ArgumentValueError: an argument is of another kind, or
                `name` is no identifier of C, or means something else there.
            OSError: a file cannot be written.
        """
        _check_path("to_wasm", folder, "folder")
        return to_wasm(self, folder, self._c_name("to_wasm", name))

    def _c_name(self, entry: str, name: str | None) -> str:
        """The name of a function in C: `name`, or that of the program.

        Raises:
            ArgumentValueError: C has another meaning for `name`.
        """
        if name is None:
            return c_name(self.__name__)
        if not isinstance(name, str) or c_name(name) != name:
            raise ArgumentValueError(
                f"{entry}: `name` must be an identifier that C does not use itself, "
                f"and is {name!r}."
            )
        return name


def _check_path(name: str, path: Any, argument: str = "path") -> None:
    if not isinstance(path, str | PathLike):
        raise ArgumentTypeError(
            f"{name}: `{argument}` must be a path, and is `{type(path).__name__}`."
        )


def size_condition(guard: Any) -> str:
    """A guard in the user's names, and the line that asked."""
    holds, env = guard.holds, guard.holds.env
    text = str(holds) if env is None else env.describe(holds)
    return f"{text}  ({guard.line})" if guard.line else text


def _same_bits(a: Any, b: Any) -> bool:
    x, y = np.asarray(a), np.asarray(b)
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


def _python_signature(arguments: tuple[str, ...], positional: int) -> inspect.Signature:
    by_position = arguments[:positional]
    plain = all(name.isidentifier() for name in by_position)
    kind = _EITHER if plain else inspect.Parameter.POSITIONAL_ONLY
    names = [
        name if name.isidentifier() else f"arg{i}" for i, name in enumerate(by_position)
    ]
    parameters = [inspect.Parameter(name, kind) for name in names]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
        for name in arguments[positional:]
    ]
    return inspect.Signature(parameters)


_EITHER: Final = inspect.Parameter.POSITIONAL_OR_KEYWORD


# --- as trees -------------------------------------------------------------------------


def _flatten(program: ExportedProgram) -> tuple[list[Any], Any, tuple[str, ...]]:
    names = tuple(program.state)
    return list(program.state.values()), _Rest(program), names


class _Rest:
    """All of a program that is no tensor, as what a tree of it holds besides."""

    __slots__ = ("program",)

    def __init__(self, program: ExportedProgram) -> None:
        self.program = program

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Rest):
            return NotImplemented
        mine, theirs = self.program, other.program
        return mine.graph.nodes is theirs.graph.nodes

    def __hash__(self) -> int:
        return id(self.program.graph.nodes)


def _unflatten(rest: Any, values: Iterable[Any]) -> ExportedProgram:
    program: ExportedProgram = rest.program
    return program.with_state(dict(zip(program.state, values, strict=True)))


pytree.register(ExportedProgram, _flatten, _unflatten, by_name=False)
