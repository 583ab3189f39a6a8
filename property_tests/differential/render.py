"""A program as source, for each backend: hopflow, NumPy in plain Python, and JAX.

NumPy's source goes through `E`, which may disturb a result that is rounded: how far the
outputs then move says how closely they can be compared. A write to a local tensor is a
write in hopflow and NumPy; JAX's source hands the tensor through each operator instead.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from property_tests.differential.grammar import (
    Block,
    Control,
    Let,
    Program,
    Statement,
    outs_of,
)

PRELUDE: Final = """
import types

import jax
import numpy as np

import hopflow as hf
from jax import lax
from jax import numpy as jnp

jax.config.update("jax_enable_x64", True)
STATE = types.SimpleNamespace()


def E(x):
    return x


def scatter(function, x, index, value):
    out = np.copy(x)
    function.at(out, index, value)
    return out


def put(x, index, value):
    out = np.copy(x)
    out[index] = value
    return out
"""


def writes(block: Block) -> list[str]:
    """Which variables of outside a block writes to."""
    made = set(block.params)
    found = []
    for statement in block.body:
        if isinstance(statement, Let) and statement.write:
            found += [statement.out]
        elif isinstance(statement, Let):
            made.add(statement.out)
        else:
            made.update(statement.outs)
            found += [n for inner in statement.blocks for n in writes(inner)]
    return sorted({n for n in found if n not in made})


def tuple_of(names: Iterable[str]) -> str:
    names = list(names)
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


class Renderer:
    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.lines: list[str] = []
        self.count = 0

    def emit(self, depth: int, *lines: str) -> None:
        self.lines += ["    " * depth + line for line in lines]

    def fresh(self, stem: str) -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def text(self, let: Let) -> str:
        text = let.text if isinstance(let.text, str) else let.text[self.backend]
        text = text.format(*let.args)
        if let.rounded and self.backend == "np" and not let.write and let.type.is_float:
            text = f"E({text})"
        return re.sub(r"\bxp\.", f"{self.backend}.", text)

    def program(self, program: Program) -> str:
        names = ", ".join(v.name for v in program.inputs)
        self.emit(0, f"def program_{self.backend}({names}):")
        for v in program.inputs:
            for axis, n in enumerate(v.type.shape):
                if repr(n) == "N":
                    self.emit(1, f"N = {v.name}.shape[{axis}]")
                    break
        self.block(1, program.block)
        self.emit(1, f"return {tuple_of(program.block.results)}")
        return "\n".join(self.lines) + "\n"

    def block(self, depth: int, block: Block) -> None:
        for statement in block.body:
            self.statement(depth, statement)

    def statement(self, depth: int, statement: Statement) -> None:
        if isinstance(statement, Let):
            text = self.text(statement)
            self.emit(depth, text if statement.write else f"{statement.out} = {text}")
        elif self.backend == "np":
            getattr(self, f"np_{statement.kind}")(depth, statement)
        elif self.backend == "hf":
            self.hf_control(depth, statement)
        else:
            self.jnp_control(depth, statement)

    # --- plain Python ---------------------------------------------------------------

    def copies(self, depth: int, outs: Sequence[str], values: Sequence[str]) -> None:
        copied = [f"np.copy({v})" for v in values]
        self.emit(depth, f"{tuple_of(outs)} = {tuple_of(copied)}")

    def np_cond(self, depth: int, node: Control) -> None:
        for block, line in zip(
            node.blocks, (f"if {node.args[0]}:", "else:"), strict=True
        ):
            self.emit(depth, line)
            self.block(depth + 1, block)
            self.copies(depth + 1, node.outs, block.results)

    def np_switch(self, depth: int, node: Control) -> None:
        index = self.fresh("index")
        self.emit(
            depth, f"{index} = min(max(int({node.args[0]}), 0), {len(node.blocks) - 1})"
        )
        for k, block in enumerate(node.blocks):
            self.emit(depth, f"if {index} == {k}:")
            self.block(depth + 1, block)
            self.copies(depth + 1, node.outs, block.results)

    def np_while(self, depth: int, node: Control) -> None:
        test, step = node.blocks
        self.copies(depth, node.outs, node.args)
        self.emit(depth, "while True:")
        self.copies(depth + 1, test.params, node.outs)
        self.block(depth + 1, test)
        self.emit(depth + 1, f"if not {test.results[0]}:", "    break")
        self.copies(depth + 1, step.params, node.outs)
        self.block(depth + 1, step)
        self.copies(depth + 1, node.outs, step.results)

    def np_fori(self, depth: int, node: Control) -> None:
        [step] = node.blocks
        low, high, *firsts = node.args
        [counter, *carries] = step.params
        self.copies(depth, node.outs, firsts)
        raw = self.fresh("i")
        self.emit(depth, f"for {raw} in range({low}, {high}):")
        self.emit(depth + 1, f"{counter} = np.asarray({raw}, dtype=np.int64)")
        self.copies(depth + 1, carries, node.outs)
        self.block(depth + 1, step)
        self.copies(depth + 1, node.outs, step.results)

    def np_scan(self, depth: int, node: Control) -> None:
        [step] = node.blocks
        xs, firsts = node.args[: node.slices], node.args[node.slices :]
        *carries, stacked = node.outs
        self.copies(depth, carries, firsts)
        raw, rows = self.fresh("i"), self.fresh("rows")
        kind = node.types[-1]
        self.emit(depth, f"{rows} = np.zeros({kind.shape!r}, dtype=np.{kind.dtype})")
        trips = f"range({xs[0]}.shape[0])" + ("[::-1]" if node.reverse else "")
        frozen = [self.fresh("xs") for _ in xs]
        self.copies(depth, frozen, xs)
        self.emit(depth, f"for {raw} in {trips}:")
        self.copies(
            depth + 1, step.params, [*carries, *(f"{x}[{raw}]" for x in frozen)]
        )
        self.block(depth + 1, step)
        self.copies(depth + 1, carries, step.results[:-1])
        self.emit(depth + 1, f"{rows}[{raw}] = {step.results[-1]}")
        self.emit(depth, f"{stacked} = {rows}")

    def np_map(self, depth: int, node: Control) -> None:
        [step] = node.blocks
        for out, kind in zip(node.outs, node.types, strict=True):
            self.emit(depth, f"{out} = np.zeros({kind.shape!r}, dtype=np.{kind.dtype})")
        raw = self.fresh("i")
        self.emit(depth, f"for {raw} in range({node.args[0]}.shape[0]):")
        self.copies(depth + 1, step.params, [f"{x}[{raw}]" for x in node.args])
        self.block(depth + 1, step)
        for out, result in zip(node.outs, step.results, strict=True):
            self.emit(depth + 1, f"{out}[{raw}] = {result}")

    np_vmap = np_map

    # --- operators ------------------------------------------------------------------

    def function(
        self,
        depth: int,
        block: Block,
        params: Sequence[str],
        opening: Sequence[str],
        result: str,
    ) -> str:
        name = self.fresh("f")
        self.emit(depth, f"def {name}({', '.join(params)}):")
        self.emit(depth + 1, *opening)
        self.block(depth + 1, block)
        self.emit(depth + 1, f"return {result}")
        return name

    def hf_control(self, depth: int, node: Control) -> None:
        outs = tuple_of(node.outs)
        if node.kind in ("cond", "switch"):
            names = [
                self.function(depth, b, (), (), tuple_of(b.results))
                for b in node.blocks
            ]
            given = (
                f"[{', '.join(names)}]" if node.kind == "switch" else ", ".join(names)
            )
            self.emit(depth, f"{outs} = hf.{node.kind}({node.args[0]}, {given})")
        elif node.kind in ("map", "vmap"):
            [block] = node.blocks
            if node.kind == "vmap":
                name = self.function(
                    depth, block, block.params, (), tuple_of(block.results)
                )
                call = f"hf.vmap({name})({', '.join(node.args)})"
            else:
                opening = [f"{tuple_of(block.params)} = row"]
                name = self.function(
                    depth, block, ["row"], opening, tuple_of(block.results)
                )
                call = f"hf.map({name}, {tuple_of(node.args)})"
            self.emit(depth, f"{outs} = {call}")
        else:
            self.hf_loop(depth, node)

    def hf_loop(self, depth: int, node: Control) -> None:
        def packed(names: Sequence[str]) -> str:
            if not node.tree:
                return tuple_of(names)
            return f'{{"first": {names[0]}, "rest": {{"all": {tuple_of(names[1:])}}}}}'

        def opening(names: Sequence[str]) -> list[str]:
            if not node.tree:
                return [f"{tuple_of(names)} = state"]
            rest = (
                f'{tuple_of(names[1:])} = state["rest"]["all"]' if names[1:] else "pass"
            )
            return [f'{names[0]} = state["first"]', rest]

        state = "state" if node.tree or node.kind == "scan" else "*state"
        step = node.blocks[-1]
        final = self.fresh("final")
        if node.kind == "while":
            test = node.blocks[0]
            names = [
                self.function(
                    depth, test, [state], opening(test.params), test.results[0]
                ),
                self.function(
                    depth, step, [state], opening(step.params), packed(step.results)
                ),
            ]
            self.emit(
                depth,
                f"{final} = hf.while_loop({', '.join(names)}, {packed(node.args)})",
            )
        elif node.kind == "fori":
            [counter, *carries] = step.params
            name = self.function(
                depth, step, [counter, state], opening(carries), packed(step.results)
            )
            low, high, *firsts = node.args
            self.emit(
                depth,
                f"{final} = hf.fori_loop({low}, {high}, {name}, {packed(firsts)})",
            )
        else:
            at = len(step.params) - node.slices
            *carries, y = step.results
            lines = [*opening(step.params[:at]), f"{tuple_of(step.params[at:])} = row"]
            result = f"{packed(carries)}, {y}"
            name = self.function(depth, step, [state, "row"], lines, result)
            xs, begin = node.args[: node.slices], node.args[node.slices :]
            self.emit(
                depth,
                f"{final}, {node.outs[-1]} = hf.scan({name}, {packed(begin)}, "
                f"{tuple_of(xs)}, reverse={node.reverse})",
            )
        outs = node.outs[:-1] if node.kind == "scan" else node.outs
        self.emit(
            depth, *(line.replace("= state", f"= {final}") for line in opening(outs))
        )

    def jnp_control(self, depth: int, node: Control) -> None:
        written = sorted({n for b in node.blocks for n in writes(b)})
        if node.kind in ("cond", "switch"):
            names = [
                self.function(depth, b, written, (), tuple_of([*b.results, *written]))
                for b in node.blocks
            ]
            given = (
                f"[{', '.join(names)}]" if node.kind == "switch" else ", ".join(names)
            )
            call = f"lax.{node.kind}({', '.join([node.args[0], given, *written])})"
            self.emit(depth, f"{tuple_of([*node.outs, *written])} = {call}")
            return
        step = node.blocks[-1]
        if node.kind in ("map", "vmap"):
            if node.kind == "vmap":
                name = self.function(
                    depth, step, step.params, (), tuple_of(step.results)
                )
                call = f"jax.vmap({name})({', '.join(node.args)})"
            else:
                opening = [f"{tuple_of(step.params)} = row"]
                name = self.function(
                    depth, step, ["row"], opening, tuple_of(step.results)
                )
                call = f"lax.map({name}, {tuple_of(node.args)})"
            self.emit(depth, f"{tuple_of(node.outs)} = {call}")
            return
        outs = tuple_of([*node.outs, *written])
        if node.kind == "while":
            test = node.blocks[0]
            names = [
                self.function(
                    depth,
                    test,
                    ["c"],
                    [f"{tuple_of([*test.params, *written])} = c"],
                    test.results[0],
                ),
                self.function(
                    depth,
                    step,
                    ["c"],
                    [f"{tuple_of([*step.params, *written])} = c"],
                    tuple_of([*step.results, *written]),
                ),
            ]
            first = tuple_of([*node.args, *written])
            self.emit(depth, f"{outs} = lax.while_loop({', '.join(names)}, {first})")
        elif node.kind == "fori":
            [counter, *carries] = step.params
            opening = [f"{tuple_of([*carries, *written])} = c"]
            result = tuple_of([*step.results, *written])
            name = self.function(depth, step, [counter, "c"], opening, result)
            low, high, *firsts = node.args
            first = tuple_of([*firsts, *written])
            self.emit(depth, f"{outs} = lax.fori_loop({low}, {high}, {name}, {first})")
        else:
            at = len(step.params) - node.slices
            *results, y = step.results
            opening = [
                f"{tuple_of([*step.params[:at], *written])} = c",
                f"{tuple_of(step.params[at:])} = row",
            ]
            result = f"{tuple_of([*results, *written])}, {y}"
            name = self.function(depth, step, ["c", "row"], opening, result)
            xs, begin = node.args[: node.slices], node.args[node.slices :]
            *finals, stacked = node.outs
            self.emit(
                depth,
                f"{tuple_of([*finals, *written])}, {stacked} = lax.scan({name}, "
                f"{tuple_of([*begin, *written])}, {tuple_of(xs)}, "
                f"reverse={node.reverse})",
            )


def used(program: Program) -> Program:
    """The program without statements that nothing reads."""
    return replace(program, block=pruned(program.block, set()))


def pruned(block: Block, needed: set[str]) -> Block:
    needed = needed | set(block.results)
    body: list[Statement] = []
    for statement in reversed(block.body):
        if isinstance(statement, Let):
            if statement.out in needed:
                needed |= set(statement.args)
                body.insert(0, statement)
        else:
            touched = {n for b in statement.blocks for n in writes(b)}
            if needed & (set(outs_of(statement)) | touched):
                # What the next step reads of a tensor that this one wrote counts too.
                kept = needed | touched
                blocks = tuple(pruned(b, kept) for b in statement.blocks)
                needed |= set(statement.args) | {n for b in blocks for n in reads(b)}
                body.insert(0, replace(statement, blocks=blocks))
    return replace(block, body=tuple(body))


def reads(block: Block) -> set[str]:
    found = set(block.results)
    for statement in block.body:
        found |= set(statement.args)
        if isinstance(statement, Control):
            for inner in statement.blocks:
                found |= reads(inner)
    return found


def source(program: Program, backend: str) -> str:
    return Renderer(backend).program(program)
