"""Programs that check their reads and writes, for `hf.config.check_bounds`.

A schedule is correct by construction: an access out of bounds is a defect of the
compiler, which shows here at once, with the buffer's name. Vector loops with checks run
element by element; `guard_pages` shows whether their vectors stay in bounds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from hopflow.loop_ir import expr as e
from hopflow.loop_ir import walk
from hopflow.loop_ir.expr import Buffer, Expr
from hopflow.loop_ir.program import (
    SERIAL,
    Call,
    For,
    HostCall,
    If,
    Invoke,
    Program,
    Ref,
    Site,
    Stmt,
    Store,
    Trap,
    While,
)


def with_bounds_checks(program: Program) -> Program:
    """Return the program with a trap of kind "bounds" before each access out of bounds.

    The trap reports the index and the extent of the axis. The functions that the
    program calls get such traps too.
    """
    return _checked(program, {})


def _checked(program: Program, done: dict[Program, Program]) -> Program:
    for function in program.functions:
        if function not in done:
            done[function] = _checked(function, done)
    pass_ = _Pass(list(program.sites), done)
    return replace(
        program,
        body=pass_.body(program.body),
        sites=pass_.sites,
        functions=[done[f] for f in program.functions],
    )


@dataclass
class _Pass:
    """The rewriting of one program.

    sites       the sites of the program and of the added traps
    functions   for each function the same function with checks
    """

    sites: list[Site]
    functions: dict[Program, Program]

    def body(self, statements: Sequence[Stmt]) -> list[Stmt]:
        checked: list[Stmt] = []
        for s in statements:
            match s:
                case While():
                    head = [*self.body(s.head), *self.checks(s)]
                    checked.append(replace(s, head=head, body=self.body(s.body)))
                    continue
                case For():
                    inner: Stmt = _loop(s, self.body(s.body))
                case If():
                    inner = If(s.test, self.body(s.then), self.body(s.else_))
                case Invoke():
                    inner = self.call(s)
                case _:
                    inner = s
            checked += [*self.checks(s), inner]
        return checked

    def call(self, s: Invoke) -> Invoke:
        """Return a call of the function with checks, which has additional sites."""
        function = self.functions[s.function]
        before = len(s.function.sites)
        site = len(self.sites)
        self.sites += self.sites[s.site : s.site + before] + function.sites[before:]
        return replace(s, function=function, site=site)

    def checks(self, s: Stmt) -> Iterator[Stmt]:
        """Yield a trap for each index in the expressions of `s` itself."""
        for buffer, at, condition, verb, rows in _accesses(s):
            for axis, (position, extent) in enumerate(
                zip(at, buffer.shape, strict=False)
            ):
                low = e.compare("lt", position, e.index(0))
                high = e.compare("le", extent, position)
                if rows is not None and axis == len(at) - 1:
                    high = e.compare("lt", extent, e.add(position, rows))
                fault = e.binary("or", low, high)
                if condition is not None:
                    fault = e.binary("and", condition, fault)
                if fault.is_const and not fault.attr:
                    continue
                description = f"{verb} `{buffer.name}`, axis {axis}"
                self.sites.append(Site("bounds", 0, description))
                yield Trap(fault, len(self.sites) - 1, (position, extent))


def _loop(s: For, body: list[Stmt]) -> For:
    """Return `s` with another body; a vector loop with traps in it becomes serial."""
    serial = s.binding.kind == "vector" and len(body) > len(s.body)
    return replace(s, body=body, binding=SERIAL if serial else s.binding)


class _Access(NamedTuple):
    """An element of a buffer, or a sub-array with `rows` along the last axis of `at`.

    verb   how it is accessed
    """

    buffer: Buffer
    at: Sequence[Expr]
    condition: Expr | None
    verb: str
    rows: Expr | None = None


def _accesses(s: Stmt) -> Iterator[_Access]:
    """Yield the accesses of `s` itself."""
    for node in walk.loaded(s):
        yield _Access(node.attr, e.index_of(node), e.condition_of(node), "reading")
    match s:
        case Store():
            yield _Access(s.buffer, s.indices, None, "writing")
        case Call():
            for ref in s.args:
                if isinstance(ref, Ref):
                    verb = f"`{s.routine}` on"
                    yield _Access(ref.buffer, ref.at, None, verb, ref.rows)
        case HostCall() | Invoke():
            called = "Python" if isinstance(s, HostCall) else f"`{s.function.name}`"
            for ref in s.refs:
                verb = f"a call of {called} on"
                yield _Access(ref.buffer, ref.at, None, verb, ref.rows)
