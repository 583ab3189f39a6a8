"""The C header of a program."""

import textwrap
from collections.abc import Mapping
from typing import Final

from hopflow.export.native.entry import shaped
from hopflow.export.native.failures import Failure
from hopflow.export.native.parameters import C_TYPES, Parameter, Parameters
from hopflow.graph.types import TensorType
from hopflow.loop_ir.program import Kind


def header(
    name: str,
    title: str,
    parameters: Parameters,
    statuses: Mapping[int, Failure],
    is_exact: bool,
) -> str:
    """The text of the header.

    Args:
        title: What was exported, and for which machine.
        statuses: Why the program may stop, by the status of the function.
        is_exact: Whether it never needs more workspace than it tells.
    """
    guard = f"{name.upper()}_H"
    parts = [
        _comment(f"{title}\n\n{_FORM}{_MADE if _makes(parameters) else ''}"),
        f"#ifndef {guard}\n#define {guard}",
        "#include <stdbool.h>\n#include <stdint.h>",
        '#ifdef __cplusplus\nextern "C" {\n#endif',
        _statuses(name, statuses),
        *_functions(name, parameters, is_exact),
        "#ifdef __cplusplus\n}\n#endif",
        f"#endif /* {guard} */\n",
    ]
    return "\n\n".join(parts)


_FORM: Final = (
    "Arrays are dense and row-major, of the shapes that stand beside them. One that is "
    "written must not overlap another one. A float16 or bfloat16 is given as its bits. "
    "Nothing is allocated, and no state is kept: several threads may call a function "
    "at once, each with a workspace and results of its own.\n\n"
    "A function returns 0, or why it has stopped: then the contents of its results are "
    "undefined, and arrays that it reads and writes are as they were."
)
_MADE: Final = (
    "\n\nArrays whose sizes only a run knows are made in the workspace: they are valid "
    "until it is used again."
)


def _makes(parameters: Parameters) -> bool:
    return any(p.role == "made" for p in parameters.all)


def _statuses(name: str, statuses: Mapping[int, Failure]) -> str:
    """The enumeration of what the function may return."""
    rows = [f"    {name.upper()}_OK = 0,"]
    for status, failure in statuses.items():
        number = f"_{status}" if status > 0 else ""
        rows.append(_comment(failure.text, 4))
        member = f"{name}_{_KINDS[failure.kind]}{number}".upper()
        rows.append(f"    {member} = {status},")
    rows[-1] = rows[-1].removesuffix(",")
    return f"enum {name}_status {{\n" + "\n".join(rows) + "\n};"


_KINDS: Final[dict[Kind | str, str]] = {
    "index": "bad_index",
    "divide": "division_by_zero",
    "power": "negative_power",
    "check": "failed_check",
    "range": "out_of_range",
    "limit": "too_many_steps",
    "memory": "out_of_memory",
    "library": "no_solution",
    "bounds": "defect",
    "size": "bad_size",
    "constraint": "failed_constraint",
}


def _functions(name: str, parameters: Parameters, is_exact: bool) -> list[str]:
    told = [_declaration(p, described=False) for p in parameters.of_sizes]
    of_sizes = ", ".join(told) or "void"
    found = []
    if results := shaped(parameters):
        shapes = [f"int64_t {p.name}_shape[{p.type.ndim}]" for p in results]
        found += [
            _comment("Tell the shapes of the results. Returns a status.")
            + f"\nint {name}_sizes({', '.join([*told, *shapes])});"
        ]
    more = "" if is_exact else _MORE
    found += [
        _comment(_WORKSPACE + more) + f"\nint64_t {name}_workspace({of_sizes});",
        _comment(_TEXT) + f"\nconst char *{name}_error_text(int status);",
    ]
    for parameter in parameters.initial:
        array = f"{name}_{parameter.name}_initial"
        text = f"What `{parameter.path}` is at first: {parameter.type}."
        kind = C_TYPES[parameter.type.dtype]
        found.append(_comment(text) + f"\nextern const {kind} {array}[];")
    rows = [_declaration(p, described=True) for p in parameters.all]
    rows += [
        "    void *workspace, /* of so many bytes as follow; may be null if 0 */",
        "    int64_t workspace_bytes,",
        "    int64_t *details); /* null, or two numbers: {0} and {1} of the text */",
    ]
    return [*found, f"int {name}(\n" + "\n".join(rows)]


_WORKSPACE: Final = (
    "How many bytes the workspace must have for these sizes; less than 0: a status, "
    "negated, for they are refused."
)
_MORE: Final = (
    " The program has arrays whose sizes only a run knows: those need more, and where "
    "there is too little, it stops."
)
_TEXT: Final = (
    "The text of a status, with the line of the program that it comes from. `{0}` and "
    "`{1}` in it are the numbers that the function has written to `details`."
)


def _declaration(parameter: Parameter, *, described: bool) -> str:
    """The declaration of a parameter, with what it is, if that is wanted."""
    kind, name = C_TYPES[parameter.type.dtype], parameter.name
    match parameter.role:
        case "size" | "number":
            text = f"{kind} {name}"
        case "input":
            text = f"const {kind} *{name}"
        case "made":
            text = f"const {kind} **{name}, int64_t *{name}_shape"
        case _:
            text = f"{kind} *{name}"
    return f"    {text}, /* {_what(parameter)} */" if described else text


def _what(parameter: Parameter) -> str:
    if parameter.role == "size":
        return f"size `{parameter.path}`"
    if parameter.role == "number":
        return parameter.path
    written = {"updated": ", read and written", "made": ", made in the workspace"}
    type_: TensorType = parameter.type
    text = f"{parameter.path}: {type_}{written.get(parameter.role, '')}"
    return text.replace("*/", "* /")


def _comment(text: str, indent: int = 0) -> str:
    """A text as a comment of C."""
    prefix = " " * indent
    lines = [
        line
        for paragraph in text.replace("*/", "* /").split("\n")
        for line in textwrap.wrap(paragraph, 84 - indent, break_long_words=False)
        or [""]
    ]
    body = f"\n{prefix} * ".join(lines)
    return "\n".join(row.rstrip() for row in f"{prefix}/* {body} */".split("\n"))
