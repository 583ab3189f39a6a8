"""What rewrites captured graphs, at any depth, keeps what programs compute."""

from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hopflow as hf
from hopflow import fx
from hopflow.graph.module import GraphModule
from hopflow.graph.verifier import verify
from hopflow.hops.base import interpreted
from hopflow.testing.checks import check
from hopflow.testing.executions import (
    REGISTRY,
    ProgramExecution,
    in_hopflow,
    register_execution,
)
from hopflow.testing.program import Program
from hopflow.testing.strategies import BODIES, BRANCHES, programs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("verified", "rewritten")]

EVERY: Final = (*BRANCHES, *BODIES, "custom_vjp", "grow", "chosen", "examples")


def transformed(module: GraphModule) -> GraphModule:
    made: GraphModule = fx.Transformer(module).transform()
    return made


def swapped(module: GraphModule) -> GraphModule:
    adds = sum(node.op is not None and node.op.name == "add" for node in walk(module))
    found = fx.replace_pattern(module, lambda a, b: a + b, lambda a, b: b + a)
    assert len(found) == adds
    return module


def walk(module: GraphModule) -> list[Any]:
    """All nodes, of bodies that calls share once."""
    return list({id(node): node for node in module.graph.walk()}.values())


def ran(change: Callable[[GraphModule], GraphModule], mode: str) -> Any:
    def run(f: Any, *args: Any) -> Any:
        module = change(hf.trace(f, *args, mode=mode, captures=True))
        verify(module.graph)
        with interpreted():
            return module(*args)

    return run


def stepped(f: Any, *args: Any) -> Any:
    return fx.Interpreter(hf.trace(f, *args, mode="symbolic", captures=True)).run(*args)


def jitted(f: Any, *args: Any) -> Any:
    module = swapped(transformed(hf.trace(f, *args, mode="symbolic", captures=True)))
    return hf.jit(module)(*args)


def imported(f: Any, *args: Any) -> Any:
    module = hf.symbolic_trace(hf.trace(f, *args, mode="symbolic", captures=True))
    again = fx.Transformer(module).transform()
    again.graph.eliminate_dead_code()
    return again.recompile()(*args)


EXECUTIONS: Final = {
    "imported": imported,
    "transformed": ran(transformed, "symbolic"),
    "swapped": ran(swapped, "symbolic"),
    "node by node": stepped,
    "rewritten and compiled": jitted,
}


@pytest.fixture(scope="module")
def rewritten() -> Iterator[None]:
    for name, run in EXECUTIONS.items():
        register_execution(ProgramExecution(name, in_hopflow(run)))
    yield
    for name in EXECUTIONS:
        del REGISTRY[name]


whole = programs("exact", operators=EVERY, mutation=True)
smooth = programs("smooth", operators=EVERY, mutation=True)


Test = Callable[..., None]


def some(share: int) -> Callable[[Test], Test]:
    """A share of the examples that the profile allows."""
    profile: Any = settings.default
    return settings(max_examples=max(profile.max_examples // share, 1))


@given(st.one_of(whole, smooth))
def test_an_identity_transformation_keeps_what_programs_compute(
    program: Program,
) -> None:
    check(program, ["eager", "transformed", "node by node"])


@some(4)
@given(st.one_of(whole, smooth))
def test_captured_graphs_as_symbolic_ones_compute_the_same(program: Program) -> None:
    check(program, ["eager", "imported"])


@given(st.one_of(whole, smooth))
def test_swapping_the_terms_of_sums_keeps_what_programs_compute(
    program: Program,
) -> None:
    check(program, ["eager", "swapped"])


@some(8)
@given(programs("exact"))
def test_rewritten_programs_compile_and_batch(program: Program) -> None:
    check(program, ["eager", "rewritten and compiled"])
    check(program, ["eager", "swapped", "rewritten and compiled"], ["vmap"])


@some(12)
@given(programs("smooth", size=4))
def test_derivatives_of_rewritten_programs_agree(program: Program) -> None:
    check(program, ["eager", "rewritten and compiled"], ["grad", "jvp"])
