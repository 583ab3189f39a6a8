"""Scheduling the nodes of a graph, one after the other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hopflow.compiler.kernel_program.definitions import (
    Compact,
    Definition,
    Effect,
    Pointwise,
    Prefix,
    Reduction,
    Scatter,
)
from hopflow.compiler.kernel_program.lowering import definition
from hopflow.compiler.liveness import Liveness
from hopflow.compiler.schedule.builder import Builder
from hopflow.compiler.schedule.kernels import CHEAP, Kernels
from hopflow.compiler.schedule.places import Pending, Registers, Slot, Stored
from hopflow.graph.core import Arg, Constant, Graph, Node, Var
from hopflow.graph.types import TensorType
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.kernels import Callback, Invocation, Library, Region
from hopflow.loop_ir.nest import Buffer, Program

Env: TypeAlias = dict[Var, Slot]


@dataclass(slots=True)
class NodeScheduler:
    """Schedules nodes that lower to kernels; those with regions are a subclass's."""

    b: Builder

    def region(
        self,
        node: Node,
        region: Region,
        types: tuple[TensorType, ...],
        uses: list[int],
        hints: list[Buffer | None],
    ) -> list[Slot]:
        """Schedule an operator with subgraphs."""
        raise NotImplementedError

    def function(self, graph: Graph) -> Program:
        """The program of a function that nodes call."""
        raise NotImplementedError

    def nodes(
        self,
        live: Liveness,
        env: Env,
        hints: Mapping[Var, Buffer] | None = None,
        skip: Sequence[Node] = (),
    ) -> list[Slot]:
        """Schedule the nodes of a graph in place; the slots of its outputs."""
        for node in live.nodes:
            if node not in skip:
                self.node(node, live, env, hints or {})
        return [self.read(arg, live, env) for arg in live.graph.outputs]

    def read(self, arg: Arg, live: Liveness, env: Env) -> Slot:
        """The slot of an argument; one reader fewer is to come."""
        if isinstance(arg, Constant):
            value = e.const(arg.value, arg.type.dtype)
            return Slot(Registers(arg.type, (value,)), 0, self.b.statements)
        slot = env[live.canonical(arg)]
        slot.uses -= 1
        return slot

    def node(
        self, node: Node, live: Liveness, env: Env, hints: Mapping[Var, Buffer]
    ) -> None:
        before, self.b.node = self.b.node, node.meta.get("number", 0)
        self._schedule(node, live, env, hints)
        for var in node.results:
            self.b.note(var.type)
        self.b.node = before

    def _schedule(
        self, node: Node, live: Liveness, env: Env, hints: Mapping[Var, Buffer]
    ) -> None:
        operands = [self.read(a, live, env) for a in node.args]
        types = tuple(v.type for v in node.results)
        counts = [live.count(v) for v in node.results]
        wanted = [hints.get(v) for v in node.results]
        lowered = node.op.lower(types, *operands, **node.params)
        results: list[Slot] = []
        is_each = isinstance(lowered, tuple)  # there is a kernel for each result
        for k, kernel in enumerate(lowered if is_each else (lowered,)):
            own = slice(k, k + 1) if is_each else slice(None)
            is_region = isinstance(kernel, Region)
            made = kernel if is_region else definition(kernel, types[own])
            results += self.definition(
                node, made, types[own], operands, counts[own], wanted[own]
            )
        for var, slot in zip(node.results, results, strict=True):
            env[var] = slot
        if node.symbol is not None:
            self.b.define(node.symbol, results[0].scalar)

    def definition(
        self,
        node: Node,
        kernel: Definition | Region,
        types: tuple[TensorType, ...],
        operands: list[Slot],
        uses: list[int],
        hints: list[Buffer | None],
    ) -> list[Slot]:
        """The results of one of the kernels that a node lowers to."""
        kernels = Kernels(self.b, node.meta.get("number", 0))
        match kernel:
            case Pointwise():
                return [
                    kernels.pointwise(kernel, types[0], operands, uses[0], hints[0])
                ]
            case Reduction():
                return kernels.reduction(kernel, types, operands, uses, hints)
            case Prefix():
                for slot in operands:
                    self.store_dear(slot)
                return [kernels.prefix(kernel, types[0], uses[0], hints[0])]
            case Compact():
                for slot in operands:
                    self.store_dear(slot)
                return [kernels.compact(kernel, types[0], uses[0], hints[0])]
            case Scatter():
                base = kernel.base
                assert isinstance(base, Slot)
                return [
                    kernels.scatter(kernel, base, operands, types[0], uses[0], hints[0])
                ]
            case Library():
                return kernels.library(kernel, types, uses, hints)
            case Callback():
                return kernels.callback(kernel, types, uses, hints)
            case Invocation():
                function = self.function(kernel.graph)
                return kernels.invoke(function, kernel, types, uses, hints)
            case Effect():
                for check in kernel.checks:
                    kernels.check(check)
                return []
            case _:
                for slot in operands:
                    self.store_dear(slot)
                    if isinstance(slot.place, Stored) and not slot.place.is_dense:
                        kernels.dense(slot)  # a body may read it many times
                with self.b.scope():
                    results = self.region(node, kernel, types, uses, hints)
                self.b.slots += results
                return results

    def store_dear(self, slot: Slot) -> None:
        if isinstance(slot.place, Pending) and slot.place.cost > CHEAP:
            self.b.settle(slot)
