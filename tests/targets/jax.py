"""What operations and operators become in JAX, as the table of targets says it."""

import importlib
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pytest
from tests.targets.calls import CALLS, exported, function_of, usual

import hopflow as hf
from hopflow.errors import ExportError
from hopflow.ops.opdef import OPERATIONS
from hopflow.testing.requires import load

REFUSED: Final = {
    "callback": "it calls Python, which `hf.export` refuses",
    "derivatives of while_loop": "only the run knows how many steps there are; "
    "differentiate the function in JAX, which needs `max_steps`; those of at most four "
    "numbers are `lax.while_loop`",
}

UNSEEN: Final = frozenset("copy copy_p jit pjit squeeze".split())
HELPERS: Final = frozenset(["broadcast_in_dim", "convert_element_type"])
UNNAMED: Final = frozenset(["call_hi_primitive"])
MOST_KINDS: Final = 4
"""Of what is made of more primitives the table has no list."""

NAMES: Final = {
    "cond": "lax.cond",
    "while": "lax.while_loop",
    "scan": "lax.scan",
    "jit": "jax.jit",
    "remat2": "jax.checkpoint",
    "custom_jvp_call": "jax.custom_jvp",
    "custom_vjp_call": "jax.custom_vjp",
}
KINDS: Final = {
    "cond": "cond",
    "switch": "cond",
    "while_loop": "while",
    "while_loop, max_steps": "while",
    "fori_loop": "while",
    "scan": "scan",
    "scan, which captures": "scan",
    "scan, reverse": "scan",
    "map": "scan",
    "associative_scan": "mul",
    "invoke_subgraph": "jit",
    "checkpoint": "remat2",
    "custom_vjp": "custom_vjp_call",
    "custom_jvp": "custom_jvp_call",
    "flex_attention": "dot_general",
    "a user's own": "while",
    "derivatives of loops": "scan",
}
"""A primitive of JAX in what each call becomes."""
CELLS: Final = {
    "switch": "`lax.switch`",
    "while_loop, max_steps": "`lax.while_loop`; differentiated, `lax.scan`",
    "fori_loop": "`lax.while_loop`; of steps known to the trace, `lax.scan`",
    "associative_scan": "`lax.associative_scan`",
    "flex_attention": "what it means, in place",
    "a user's own": "what it means, in place",
}
"""What the table says if that is not the name of the primitive."""


def primitives(jaxpr: Any) -> Iterator[str]:
    """The primitives of a jaxpr and of those in it."""
    core = importlib.import_module("jax.extend.core")
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for inner in core.jaxprs_in_params(equation.params):
            yield from primitives(inner)


def traced(program: Any, *args: Any) -> list[str]:
    """The primitives that a program becomes."""
    jax = load("jax")
    with jax.enable_x64(True):
        jaxpr = jax.make_jaxpr(program.to_jax())(*map(np.asarray, args))
    return list(primitives(jaxpr.jaxpr))


def operation(name: str) -> str:
    """The cell of an operation: its primitives, in its most usual dtype."""
    if name in REFUSED:
        return f"*refused: {REFUSED[name]}*"
    op = OPERATIONS[name]
    row = usual(op, op.samples[0])
    program = exported(function_of(op, [row]), *map(hf.asarray, row.operands))
    found = {*traced(program, *row.operands)} - UNSEEN
    kinds = sorted(found - HELPERS or found)
    if len(kinds) > MOST_KINDS or UNNAMED & found:
        return "composed"
    return ", ".join(f"`{k}`" for k in kinds) or "the operand"


def operator(name: str) -> str:
    """The cell of an operator."""
    if name in REFUSED:
        call = CALLS[name]
        with pytest.raises(ExportError, match="only the run knows"):
            traced(exported(call.function, *call.args), *call.args)
        return f"*refused: {REFUSED[name]}*"
    return CELLS.get(name, f"`{NAMES.get(KINDS[name])}`")
