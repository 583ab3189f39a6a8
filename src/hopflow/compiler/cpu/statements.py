"""Structured statements as basic blocks of a CPU's function."""

from collections.abc import Sequence
from functools import partial

from hopflow.compiler.cpu import (
    calls,
    gang,
    host_calls,
    parallel,
    routines,
    segments,
    vector,
)
from hopflow.compiler.cpu.emitter import CpuEmitter
from hopflow.compiler.cpu.memory import ProgramMemory
from hopflow.compiler.cpu.unit import Unit
from hopflow.compiler.llvm.module import Function
from hopflow.loop_ir.program import Call, For, HostCall, Invoke, Stmt, Tick


class StatementEmitter(CpuEmitter):
    """An emitter of all statements: vectors and threads, long bodies, and calls."""

    def __init__(self, f: Function, memory: ProgramMemory, unit: Unit) -> None:
        super().__init__(f, memory, unit)
        self.emitters |= {
            Call: self._call,
            HostCall: self._host_call,
            Tick: partial(host_calls.emit_tick, self),
            Invoke: partial(calls.emit, self),
        }

    def body(self, statements: Sequence[Stmt]) -> None:
        if self.has_block and segments.is_long(statements, self.unit.lengths):
            segments.emit(self, statements)
        else:
            self.straight(statements)

    def straight(self, statements: Sequence[Stmt]) -> None:
        for statement in calls.runs(self, statements):
            if isinstance(statement, list):
                calls.emit_all(self, statement)
            else:
                self.emit(statement)

    def steps(self, s: For) -> None:
        if s.binding.kind == "threads":
            parallel.emit(self, s)
        elif s.binding.kind == "gang":
            gang.emit(self, s)
        elif s.binding.kind == "vector" and vector.suits(s):
            vector.emit(self, s)
        else:
            super().steps(s)

    def _call(self, s: Call) -> None:
        routines.emit(self, s)
        self.values.forget_loads()

    def _host_call(self, s: HostCall) -> None:
        host_calls.emit(self, s)
        self.values.forget_loads()
