"""The commands about exported programs: export, inspect, run, convert and diff."""

import argparse
import ast
import importlib
import importlib.util
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from hopflow import pytree
from hopflow.errors import ArgumentValueError, HopflowError
from hopflow.export.api import export, load
from hopflow.export.arrays import read_array
from hopflow.export.document import write_document
from hopflow.export.native.targets import TARGETS
from hopflow.export.program import ExportedProgram
from hopflow.export.signature import Input, plain_path
from hopflow.export.specs import Example, Specs
from hopflow.tensor import asarray
from hopflow.trace.dims import Dim

Options: TypeAlias = argparse.Namespace


class _Command(NamedTuple):
    """A command: what `--help` says of it, an example, its arguments, and what it does.

    run   prints its results, and returns the exit status
    """

    about: str
    example: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Options], int]


def add_commands(commands: Any) -> None:
    """Add the commands to the subparsers of the command `hopflow`."""
    for name, command in COMMANDS.items():
        parser = commands.add_parser(
            name,
            help=command.about,
            description=f"{command.about[0].upper()}{command.about[1:]}.",
            epilog=f"example:\n{command.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.arguments(parser)
        parser.set_defaults(run=_reporting(name, command.run))


def _reporting(name: str, run: Callable[[Options], int]) -> Callable[[Options], int]:
    """Return `run`, which prints the errors of hopflow and of files."""

    def reporting(options: Options) -> int:
        try:
            return run(options)
        except (HopflowError, OSError, MemoryError) as error:
            text = str(error) or type(error).__name__
            print(f"hopflow {name}: {text}", file=sys.stderr)
            return 2

    return reporting


def _working(text: str) -> AbstractContextManager[Any]:
    """Show `text` and a clock while it takes long, if stderr is a terminal."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        return nullcontext()
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    shown = Progress(*columns, console=Console(stderr=True), transient=True)
    shown.add_task(text, total=None)
    return shown


def _add_file(parser: argparse.ArgumentParser, name: str = "file") -> None:
    parser.add_argument(name, metavar="FILE", help="a .hopflow file")


def _add_output(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument(
        "-o", "--output", required=True, type=Path, metavar="PATH", help=text
    )


# --- export ---------------------------------------------------------------------------


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "function",
        metavar="MODULE:FUNCTION",
        help="a function, or a module of hopflow; MODULE may be the path of a .py file",
    )
    parser.add_argument(
        "--arg",
        action="append",
        default=[],
        metavar="[NAME=]SPEC",
        help="an argument, in order or by name: a dtype with a shape, whose names are "
        "symbolic sizes; a number; a constant; a container of these; or @FILE.npy",
    )
    parser.add_argument(
        "--dim",
        action="append",
        default=[],
        metavar="NAME=MIN..MAX",
        help="the range of a symbolic size; each end may be missing",
    )
    parser.add_argument(
        "--derivatives",
        type=int,
        default=0,
        metavar="K",
        help="orders kept of derivatives that the function defines itself "
        "(default: %(default)s)",
    )
    _add_output(parser, "the .hopflow file")


def _export(options: Options) -> int:
    function = _function(options.function)
    specs = Specs(dict(map(_dim, options.dim)))
    by_position: list[Example] = []
    by_name: dict[str, Example] = {}
    for text in options.arg:
        name, value = _NAMED.fullmatch(text).groups()  # type: ignore[union-attr]
        if name is not None:
            by_name[name] = specs.read(value)
        elif by_name:
            raise ArgumentValueError(
                f"`--arg {text}` has no name, and comes after one that has."
            )
        else:
            by_position.append(specs.read(value))
    by_name = dict(sorted(by_name.items()))  # the order of `dynamic_shapes`
    with _working(f"exporting {options.function}"):
        program = export(
            function,
            tuple([example.value for example in by_position]),
            {name: example.value for name, example in by_name.items()},
            dynamic_shapes=[e.dynamic for e in (*by_position, *by_name.values())],
            derivatives=options.derivatives,
        )
        program.save(options.output)
    print(f"{options.output}: {program!r}\n{program.signature}")
    return 0


_NAMED: Final = re.compile(r"(?:(\w+)=)?(.*)", re.DOTALL)
_RANGE: Final = re.compile(r"(\w+)=(\d*)\.\.(\d*)")


def _dim(text: str) -> tuple[str, Dim]:
    found = _RANGE.fullmatch(text)
    if found is None:
        raise ArgumentValueError(
            f"`--dim {text}` is no range of a size; examples: n=2..4096, n=2.."
        )
    name, low, high = found.groups()
    return name, Dim(name, min=int(low or 0), max=int(high) if high else None)


def _function(text: str) -> Any:
    """Return the object that MODULE:FUNCTION names.

    Raises:
        ArgumentValueError: there is none.
    """
    module_name, _, path = text.partition(":")
    if not module_name or not path:
        raise ArgumentValueError(
            f"`{text}` does not name a function as MODULE:FUNCTION."
        )
    found: Any = _module(module_name)
    for name in path.split("."):
        if not hasattr(found, name):
            close = get_close_matches(name, dir(found), 1)
            hint = f" Did you mean `{close[0]}`?" if close else ""
            raise ArgumentValueError(
                f"`{text}`: `{module_name}` has no `{path}`.{hint}"
            )
        found = getattr(found, name)
    return found


def _module(name: str) -> ModuleType:
    """Import a module by its name or by its file, as Python's command does."""
    if not name.endswith(".py"):
        sys.path.insert(0, "")
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # the module exists, and imports one that does not
            raise ArgumentValueError(f"there is no module `{error.name}`.") from None
        finally:
            sys.path.remove("")
    file = Path(name)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None or not file.exists():
        raise ArgumentValueError(f"there is no file `{name}`.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # as the import statement does
    sys.path.insert(0, str(file.parent))
    spec.loader.exec_module(module)
    return module


# --- inspect --------------------------------------------------------------------------


def _inspect_arguments(parser: argparse.ArgumentParser) -> None:
    _add_file(parser)
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--graph", action="store_true", help="print its graph as Python")
    shown.add_argument(
        "--json", action="store_true", help="print all but its tensors as JSON"
    )


def _inspect(options: Options) -> int:
    program = load(options.file)
    if options.graph:
        program.print_readable()
    elif options.json:
        held = program.module, program.arguments, program.positional
        document = write_document(*held, program.derivatives)
        print(json.dumps(document.data, indent=2))
    else:
        print("\n".join(_described(options.file, program)))
    return 0


def _described(file: str, program: ExportedProgram) -> Iterator[str]:
    held = sum(np.asarray(tensor).nbytes for tensor in program.state.values())
    size = Path(file).stat().st_size
    yield f"{program!r}"
    yield f"file: {size:,} bytes, {held:,} of them tensors"
    yield str(program.signature)
    for title, conditions in (
        ("constraints", program.constraints),
        ("asserts", program.asserts),
    ):
        if conditions:
            yield from (f"{title}:", *(f"    {condition}" for condition in conditions))
    used = Counter(
        node.kind if node.op is None else node.op.name for node in program.graph.walk()
    )
    yield "operators:"
    yield from (f"    {name} {count}" for name, count in sorted(used.items()))
    if program.derivatives:
        yield f"derivatives of its own rules: {program.derivatives}"


# --- run ------------------------------------------------------------------------------


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    _add_file(parser)
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="[PATH=]VALUE",
        help="a tensor or number of the arguments, in order or by its path, as "
        "`inspect` shows it or params.w.0: a .npy file or a Python literal",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="where each result is saved, as result.npy or result.PATH.npy "
        "(default: they are printed)",
    )


def _run(options: Options) -> int:
    program = load(options.file)
    signature = program.signature
    values = _inputs(program, options.input)
    arguments = pytree.unflatten(signature.in_spec, values)
    count = signature.positional
    by_name = dict(zip(signature.arguments[count:], arguments[count:], strict=True))
    with _working(f"running {program.__name__}"):
        result = program(*arguments[:count], **by_name)
    leaves = pytree.flatten(result)[0]
    paths = pytree.leaf_paths(signature.out_spec, "result")
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
    for path, leaf in zip(paths, leaves, strict=True):
        if options.output is None:
            print(f"{path} = {leaf}")
            continue
        file = options.output / f"{plain_path(path)}.npy"
        np.save(file, np.asarray(leaf))
        print(f"{file}: {asarray(leaf).type}")
    return 0


def _inputs(program: ExportedProgram, texts: Sequence[str]) -> list[Any]:
    """Return the leaves of the arguments.

    Raises:
        ArgumentValueError: a value is missing, is one too many, or cannot be read.
    """
    inputs = program.signature.inputs
    free = {x.path: x for x in inputs if x.kind != "constant"}
    values: dict[str, Any] = {}
    named = {name: p for p in free for name in (p, plain_path(p))}
    for text in texts:
        name, _, value = text.partition("=")
        path = named.get(name)
        if path is None:
            path, value = next((p for p in free if p not in values), ""), text
        if path in values or not path:
            raise ArgumentValueError(
                f"`--input {text}` is one too many. {_inputs_of(program)}"
            )
        values[path] = _value(value, free[path])
    if missing := [path for path in free if path not in values]:
        raise ArgumentValueError(
            f"there is no `--input` for `{missing[0]}`. {_inputs_of(program)}"
        )
    return [x.value if x.kind == "constant" else values[x.path] for x in inputs]


def _inputs_of(program: ExportedProgram) -> str:
    rows = [str(x) for x in program.signature.inputs if x.kind != "constant"]
    return f"The program takes {'; '.join(rows) or 'nothing'}."


def _value(text: str, of: Input) -> Any:
    dtype = None if of.type is None else of.type.dtype
    if text.endswith(".npy"):
        return asarray(read_array(text, dtype))
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise ArgumentValueError(
            f"`{of.path}`: `{text[:80]}` is neither a .npy file nor a literal."
        ) from None
    if of.kind == "tensor":
        return asarray(value, dtype=dtype)
    return float(value) if dtype and type(value) is int else value


# --- convert --------------------------------------------------------------------------


def _convert_arguments(parser: argparse.ArgumentParser) -> None:
    _add_file(parser)
    parser.add_argument(
        "--to",
        required=True,
        choices=WRITERS,
        help="what it becomes; see docs/export.md",
    )
    parser.add_argument(
        "--machine",
        choices=TARGETS,
        help="what native code is for (default: this machine, with all that it has)",
    )
    _add_output(parser, "the file or folder")


def _convert(options: Options) -> int:
    if options.machine is not None and options.to != "native":
        raise ArgumentValueError(f"`--machine` is for native code, not {options.to}.")
    program = load(options.file)
    machine = {} if options.machine is None else {"target": options.machine}
    with _working(f"converting {options.file} to {options.to}"):
        WRITERS[options.to](program, options.output, **machine)
    print(options.output)
    return 0


WRITERS: Final[Mapping[str, Callable[..., Any]]] = {
    "onnx": ExportedProgram.to_onnx,
    "stablehlo": ExportedProgram.to_stablehlo,
    "native": ExportedProgram.to_native,
    "wasm": ExportedProgram.to_wasm,
}


# --- diff -----------------------------------------------------------------------------


def _diff_arguments(parser: argparse.ArgumentParser) -> None:
    _add_file(parser, "old")
    _add_file(parser, "new")


def _diff(options: Options) -> int:
    differences = load(options.old).diff(load(options.new))
    for difference in differences:
        print(difference)
    return 1 if differences else 0


COMMANDS: Final[Mapping[str, _Command]] = {
    "export": _Command(
        "export a function as a .hopflow file",
        '    hopflow export model.py:predict --arg "f32[rows, 64]" \\\n'
        "        --dim rows=1..4096 -o digits.hopflow",
        _export_arguments,
        _export,
    ),
    "inspect": _Command(
        "print what a program takes, gives, holds and uses",
        "    hopflow inspect digits.hopflow --graph",
        _inspect_arguments,
        _inspect,
    ),
    "run": _Command(
        "run a program on saved arrays",
        "    hopflow run digits.hopflow --input images.npy --output results",
        _run_arguments,
        _run,
    ),
    "convert": _Command(
        "write a program for another runtime",
        "    hopflow convert digits.hopflow --to onnx -o digits.onnx\n"
        "    hopflow convert digits.hopflow --to native --machine aarch64 -o built",
        _convert_arguments,
        _convert,
    ),
    "diff": _Command(
        "print where two programs differ; the status is 1 if they do",
        "    hopflow diff old.hopflow new.hopflow",
        _diff_arguments,
        _diff,
    ),
}
