"""What the JavaScript around a module must know of its program, and its TypeScript
declarations."""

import json
from collections.abc import Iterator
from typing import Any, Final

from hopflow import dtypes
from hopflow.export.exported import Exported
from hopflow.export.native.build import Compiled
from hopflow.export.native.entry import shaped
from hopflow.export.native.parameters import Parameter, Parameters
from hopflow.export.sizes import SymbolWriter
from hopflow.graph.module import Source
from hopflow.symbolic.size import Size, Symbol, SymInt, free_symbols


def symbols(compiled: Compiled) -> list[str]:
    """The names in the object code that JavaScript uses."""
    name, parameters = compiled.name, compiled.parameters
    found = [name, f"{name}_workspace", f"{name}_error_text"]
    if shaped(parameters):
        found.append(f"{name}_sizes")
    return [*found, *_initial(compiled).values()]


def _initial(compiled: Compiled) -> dict[str, str]:
    """By parameter, the data that state begins with."""
    held = compiled.parameters.initial
    return {p.name: f"{compiled.name}_{p.name}_initial" for p in held}


def interface(program: Exported, compiled: Compiled) -> dict[str, Any]:
    """The parameters of the function of a program, as data.

    A size is a number, the name of a parameter, or an operation on sizes; None: it
    depends on what JavaScript does not know before the call.
    """
    parameters = compiled.parameters
    given = {
        symbol: source.name
        for symbol, source in parameters.symbols.items()
        if isinstance(source, Parameter) and source.is_by_value
    }
    writer = SymbolWriter({}, dict(given), set(given.values()))

    def size(n: Size) -> Any:
        if isinstance(n, SymInt) and not given.keys() >= set(free_symbols(n)):
            return None
        return writer.size(n)

    with_shapes, of_sizes = shaped(parameters), set(parameters.of_sizes)
    numbers = {f.path for f in program.signature.outputs if f.kind == "number"}
    rows = [
        {
            "name": p.name,
            "path": p.path,
            "text": text_of(p),
            "role": p.role,
            "dtype": p.type.dtype.name,
            "shape": [size(n) for n in p.type.shape],
            "is_shaped": p in with_shapes,
            "is_of_sizes": p in of_sizes,
            "is_number": p.role in ("output", "made") and p.path in numbers,
        }
        for p in parameters.all
    ]
    return {
        "name": compiled.name,
        "parameters": rows,
        "sources": dict(_sources(program, parameters, given)),
        "initial": _initial(compiled),
    }


def text_of(parameter: Parameter) -> str:
    """A parameter for readers: `x: f32[rows]`."""
    if parameter.role == "size":
        return f"size `{parameter.path}`"
    kind = "int" if parameter.type.dtype.is_integer else "float"
    type_ = kind if parameter.role == "number" else parameter.type
    return f"{parameter.path}: {type_}"


def _sources(
    program: Exported, parameters: Parameters, given: dict[Symbol, str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Which axis of which array tells a size."""
    by_path = {p.path: p for p in parameters.all if p.role in ("input", "updated")}
    leaves = program.signature.inputs
    for symbol, source in program.module.sources.items():
        if isinstance(source, Source) and source.axis is not None and symbol in given:
            yield (
                given[symbol],
                {
                    "input": by_path[leaves[source.leaf].path].name,
                    "axis": source.axis,
                    "factor": source.factor,
                    "offset": source.offset,
                },
            )


def as_script(data: object) -> str:
    """Data as JavaScript, which may stand in a page."""
    return json.dumps(data).replace("<", "\\u003c")


# --- TypeScript -----------------------------------------------------------------------

_ARRAYS: Final = {
    dtypes.bool_: "Uint8Array",
    dtypes.int64: "BigInt64Array",
    dtypes.uint64: "BigUint64Array",
    dtypes.float16: "Float16Bits",
    dtypes.bfloat16: "Uint16Array",
    **{dtypes.as_dtype(f"int{n}"): f"Int{n}Array" for n in (8, 16, 32)},
    **{dtypes.as_dtype(f"uint{n}"): f"Uint{n}Array" for n in (8, 16, 32)},
    **{dtypes.as_dtype(f"float{n}"): f"Float{n}Array" for n in (32, 64)},
}


def declarations(title: str, data: dict[str, Any], parameters: Parameters) -> str:
    """The TypeScript declarations of the module `<name>.mjs`."""
    held = list(parameters.initial)
    taken = [p for p in parameters.all if p.role in ("input", "updated", "number")]
    arguments = [_member(p, _argument_type(p)) for p in taken if p not in held]
    arguments += [
        _member(p, "number | bigint", "?") for p in parameters.all if p.role == "size"
    ]
    numbers = {row["name"] for row in data["parameters"] if row["is_number"]}
    results = [
        _member(p, _number_type(p) if p.name in numbers else _array_type(p))
        for p in parameters.all
        if p.role in ("output", "made")
    ]
    state = [_member(p, _array_type(p)) for p in held]
    return _DECLARATIONS.format(
        title=title.replace("*/", "* /"),
        arguments="\n".join(arguments),
        results="\n".join(results),
        state="\n".join(state),
    )


def _member(parameter: Parameter, type_: str, mark: str = "") -> str:
    text = text_of(parameter).replace("*/", "* /")
    return f"  /** {text} */\n  {parameter.name}{mark}: {type_};"


def _array_type(parameter: Parameter) -> str:
    return f"Shaped<{_ARRAYS[parameter.type.dtype]}>"


def _number_type(parameter: Parameter) -> str:
    dtype = parameter.type.dtype
    if dtype is dtypes.bool_:
        return "boolean"
    return "bigint" if dtype in (dtypes.int64, dtypes.uint64) else "number"


def _argument_type(parameter: Parameter) -> str:
    dtype = parameter.type.dtype
    number = "number | bigint" if dtype.is_integer else "number"
    if parameter.role == "number":
        return number
    array = f"MaybeShaped<{_ARRAYS[dtype]}>"
    if parameter.type.ndim or parameter.role == "updated":
        return array
    if dtype is dtypes.bool_:
        return f"{array} | boolean"
    is_bits = dtype in (dtypes.float16, dtypes.bfloat16)
    return array if is_bits else f"{array} | {number}"


_DECLARATIONS: Final = """\
/** {title} */

/** Rows after rows. */
export type Shaped<A> = A & {{ shape: number[] }};
/** `shape` may be missing where the length tells it. */
export type MaybeShaped<A> = A & {{ shape?: readonly number[] }};
/** Its bits, or a Float16Array where there is one. */
export type Float16Bits = Uint16Array | (ArrayBufferView & ArrayLike<number>);

export interface Arguments {{
{arguments}
}}

export interface Results {{
{results}
}}

/** What calls read and write besides their arguments. */
export interface State {{
{state}
}}

export interface Program {{
  readonly signature: typeof signature;
  readonly state: State;
  /** Run the program once. Throws ProgramError if it stops, and TypeError or RangeError
   * for arguments that it cannot take. */
  run(given: Arguments): Results;
}}

/** What the program takes and gives, in the order of its function. */
export const signature: {{
  readonly name: string;
  readonly parameters: readonly {{
    readonly name: string;
    readonly path: string;
    readonly text: string;
    readonly role: string;
    readonly dtype: string;
    readonly shape: readonly unknown[];
  }}[];
}};

/** A program that has stopped: `kind` is the class of the error in Python, and the
 * message its text, with the line of the function that was exported. */
export class ProgramError extends Error {{
  readonly kind: string;
  readonly status: number;
}}

/** Load the program: from the module's bytes, a URL, a compiled module, or the file
 * beside this one. */
export function load(
  source?: BufferSource | string | URL | WebAssembly.Module,
): Promise<Program>;
"""
