"""Loops over threads: their bodies as functions, and the native code that runs them.

Such a loop becomes a function of a range of iterations. An array of words passes it the
variables and the buffers of the enclosing program that it reads.

`hf_parallel` runs it. The calling thread begins with the first iterations, and starts
other threads only after several times the time that it takes to start them: a short
loop costs no more than a call. Each thread repeatedly takes a stretch of iterations,
short enough that it returns now and then. The results do not depend on the assignment
of iterations to threads. A trap ends the loop as it does serially: the one of the
lowest iteration is reported. Only the first thread polls for Ctrl-C; the others read
its flag.
"""

from typing import Final

from hopflow.compiler.cpu.captures import Cells, captured
from hopflow.compiler.cpu.emitter import CpuEmitter
from hopflow.compiler.cpu.memory import ProgramMemory
from hopflow.compiler.cpu.stubs import (
    FLAG,
    HEADER,
    INTERRUPTED,
    JOB,
    TRAP_VALUES,
)
from hopflow.compiler.cpu.target import HOT
from hopflow.compiler.llvm.module import RARE, Function
from hopflow.compiler.llvm.types import register_type
from hopflow.loop_ir import expr as e
from hopflow.loop_ir import walk
from hopflow.loop_ir.expr import Buffer, Var
from hopflow.loop_ir.program import For, Swap

MOST: Final = 64
"""The largest number of threads."""
START: Final = 500_000
"""Nanoseconds after which other threads are started. To start them takes 20,000, but a
thread that waits for a busy processor costs millions."""
SHORT: Final = 10_000
"""After a stretch that took fewer nanoseconds, the next is twice as long."""
LONG: Final = 100_000
"""After a stretch that took more nanoseconds, the next is half as long."""


def emit(emitter: CpuEmitter, s: For) -> None:
    """Emit the function of a loop, and the call of `hf_parallel` with it."""
    f = emitter.f
    private = emitter.private[s]
    variables, named = captured(s.body, [s.var])
    buffers = [b for b in named if b not in private]
    captures = Cells()
    for var in variables:
        captures.add(register_type(var.dtype), emitter.values.value(e.read(var)))
    for buffer in buffers:
        captures.add("ptr", emitter.memory.pointer(buffer))
    captures.add("i64", emitter.first_site or "0")
    cells = captures.stored(f)
    name = _define(emitter, s, captures, variables, buffers)
    extent = emitter.values.value(s.extent)
    f.module.external("i64 @hf_parallel(ptr, ptr, ptr, i64)", "nounwind")
    status = f.emit(
        f"call i64 @hf_parallel(ptr %block, ptr @{name}, ptr {cells}, i64 {extent})"
    )
    go_on, stop = f.name("joined"), f.name("stopped")
    f.branch_if(f.emit(f"icmp ne i64 {status}, 0"), stop, go_on, RARE)
    f.start(stop)
    emitter.leave(status)
    f.start(go_on)
    emitter.values.forget_loads()
    emitter.cost.unbounded = emitter.cost.polls = True


def _define(
    emitter: CpuEmitter,
    s: For,
    captures: Cells,
    variables: list[Var],
    buffers: list[Buffer],
) -> str:
    """Define the function of the iterations from `%begin` to `%end`, at least one."""
    outer = emitter.f
    name = outer.module.fresh("hf.part")
    f = Function(
        outer.module,
        f"internal i64 @{name}(ptr %block, ptr %cells, i64 %begin, i64 %end)",
        HOT,
    )
    inner = emitter.for_function(f, ProgramMemory.of(f, emitter.memory))
    for k, var in enumerate(variables):
        inner.values.constants[var] = captures.loaded(f, k)
    for k, buffer in enumerate(buffers, start=len(variables)):
        inner.memory.place(buffer, captures.loaded(f, k))
    if emitter.first_site:
        inner.first_site = captures.loaded(f, len(variables) + len(buffers))
    slots = _allocate(inner, s, emitter.private[s])
    f.branch("first")
    f.start("first")

    def iteration(position: str) -> None:
        inner.values.constants[s.var] = position
        inner.body(s.body)

    inner.loop("%begin", "%end", 1, s.extent, iteration)
    inner.finish()
    f.start("exit")
    for slot in slots:
        inner.unit.heap.free(f, f.emit(f"load ptr, ptr {slot}"))
    f.do(f"ret i64 {f.emit(f'load i64, ptr {inner.status}')}")
    outer.module.define(name, f.text)
    return name


def _allocate(inner: CpuEmitter, s: For, private: list[Buffer]) -> list[str]:
    """Allocate the memory that is private to a thread; return the slots to free."""
    f, memory = inner.f, inner.memory
    swapped = {
        b for t in walk.statements(s.body) if isinstance(t, Swap) for b in (t.a, t.b)
    }
    slots = [f.early_slot("ptr", "own", "null") for _ in private]
    for buffer, slot in zip(private, slots, strict=True):
        pointer = inner.unit.heap.allocate(f, inner.allocation(buffer))
        f.do(f"store ptr {pointer}, ptr {slot}")
        inner.no_memory_if(f.emit(f"icmp eq ptr {pointer}, null"))
        if buffer in swapped:
            memory.place_in_slot(buffer, pointer)
        else:
            memory.place(buffer, pointer)
    return slots


# --- the native code ------------------------------------------------------------------

# Words of a job, which all threads share. At the end, for each thread: the start of the
# stretch that failed, its status, and the two values of a trap.
(
    _FUNCTION,
    _CELLS,
    _EXTENT,
    _NEXT,  # the first iteration that no thread has taken
    _STOP,  # whether there was an interrupt
    _FAILED,  # the start of the first stretch that failed
    _RUNNING,  # the number of running threads besides the first
    _STARTED,  # the number of threads ever started
    _BEGAN,  # the start time; `NEVER` once others were started
) = range(9)
_REPORTS: Final = 9
NEVER: Final = 2**63 - 1
_WORDS: Final = _REPORTS + 4 * MOST


def _words(*words: int) -> str:
    """Return lines with the addresses of words of `%job`, as `%job.0` and so on."""
    return "\n".join(
        f"  %job.{k} = getelementptr i64, ptr %job, i64 {k}" for k in words
    )


_WORK: Final = f"""
declare i64 @llvm.smin.i64(i64, i64)
declare i64 @llvm.smax.i64(i64, i64)

define internal void @work(ptr %job, ptr %block, i64 %who, i1 %leads) nounwind {{
entry:
{_words(_FUNCTION, _CELLS, _EXTENT, _NEXT, _STOP, _FAILED)}
  %function = load ptr, ptr %job.{_FUNCTION}
  %cells = load ptr, ptr %job.{_CELLS}
  %extent = load i64, ptr %job.{_EXTENT}
  %offset = shl i64 %who, 2
  %place = add i64 %offset, {_REPORTS}
  %report = getelementptr i64, ptr %job, i64 %place
  %to.v0 = getelementptr i64, ptr %block, i64 {TRAP_VALUES}
  %to.v1 = getelementptr i64, ptr %block, i64 {TRAP_VALUES + 1}
  %threads = load i64, ptr @hf_num_threads
  %parts = shl i64 %threads, 1
  %entered = call i64 @now()
  br label %claim
claim:
  %size = phi i64 [ 1, %entry ], [ %size.next, %again ]
  %before = phi i64 [ %entered, %entry ], [ %after, %again ]
  %polled = phi i64 [ %entered, %entry ], [ %polled.next, %again ]
  %begin = atomicrmw add ptr %job.{_NEXT}, i64 %size seq_cst
  %halted = load atomic i64, ptr %job.{_STOP} seq_cst, align 8
  %failed = load atomic i64, ptr %job.{_FAILED} seq_cst, align 8
  %stops = icmp ne i64 %halted, 0
  %all.taken = icmp sge i64 %begin, %extent
  %too.late = icmp sgt i64 %begin, %failed
  %late.0 = or i1 %stops, %all.taken
  %late = or i1 %late.0, %too.late
  br i1 %late, label %done, label %run
run:
  %past = add i64 %begin, %size
  %end = call i64 @llvm.smin.i64(i64 %past, i64 %extent)
  %status = call i64 %function(ptr %block, ptr %cells, i64 %begin, i64 %end)
  %after = call i64 @now()
  %good = icmp eq i64 %status, 0
  br i1 %good, label %adapt, label %bad
bad:
  %to.status = getelementptr i64, ptr %report, i64 1
  %to.r0 = getelementptr i64, ptr %report, i64 2
  %to.r1 = getelementptr i64, ptr %report, i64 3
  %v0 = load i64, ptr %to.v0
  %v1 = load i64, ptr %to.v1
  store i64 %begin, ptr %report
  store i64 %status, ptr %to.status
  store i64 %v0, ptr %to.r0
  store i64 %v1, ptr %to.r1
  %unused.0 = atomicrmw min ptr %job.{_FAILED}, i64 %begin seq_cst
  %interrupted = icmp eq i64 %status, {INTERRUPTED}
  br i1 %interrupted, label %halt, label %done
adapt:
  %took = sub i64 %after, %before
  %short = icmp slt i64 %took, {SHORT}
  %long = icmp sgt i64 %took, {LONG}
  %twice = shl i64 %size, 1
  %half = lshr i64 %size, 1
  %size.0 = select i1 %long, i64 %half, i64 %size
  %size.1 = select i1 %short, i64 %twice, i64 %size.0
  %left = sub i64 %extent, %end
  %share = sdiv i64 %left, %parts
  %size.2 = call i64 @llvm.smin.i64(i64 %size.1, i64 %share)
  %size.next = call i64 @llvm.smax.i64(i64 %size.2, i64 1)
  %since = sub i64 %after, %polled
  %polls.0 = icmp sge i64 %since, {LONG}
  %polls = and i1 %polls.0, %leads
  br i1 %polls, label %poll, label %again
poll:
  %signal = call preserve_mostcc i64 @hf_poll(ptr %block)
  %calm = icmp eq i64 %signal, 0
  br i1 %calm, label %again, label %halt
again:
  %polled.next = phi i64 [ %polled, %adapt ], [ %after, %poll ]
  br label %claim
halt:
  store atomic i64 1, ptr %job.{_STOP} seq_cst, align 8
  br label %done
done:
  ret void
}}
"""

_START: Final = f"""
declare i32 @pthread_create(ptr, ptr, ptr, ptr)
declare i32 @pthread_detach(i64)
declare i32 @nanosleep(ptr, ptr)
@hf_num_threads = external global i64

define internal void @start(ptr %job) nounwind {{
entry:
{_words(_EXTENT, _NEXT, _RUNNING, _BEGAN)}
  %thread = alloca i64
  %asked = load i64, ptr @hf_num_threads
  %threads = call i64 @llvm.smin.i64(i64 %asked, i64 {MOST})
  %began = load i64, ptr %job.{_BEGAN}
  %now = call i64 @now()
  %elapsed = sub i64 %now, %began
  %long = icmp sge i64 %elapsed, {START}
  %extent = load i64, ptr %job.{_EXTENT}
  %next = load atomic i64, ptr %job.{_NEXT} seq_cst, align 8
  %some = icmp slt i64 %next, %extent
  %several = icmp sgt i64 %threads, 1
  %worth = and i1 %some, %several
  %wanted = and i1 %long, %worth
  br i1 %wanted, label %once, label %done
once:
  store i64 {NEVER}, ptr %job.{_BEGAN}
  br label %start
start:
  %k = phi i64 [ 1, %once ], [ %k.next, %started ]
  %unused.1 = atomicrmw add ptr %job.{_RUNNING}, i64 1 seq_cst
  %fault = call i32 @pthread_create(ptr %thread, ptr null, ptr @help, ptr %job)
  %made = icmp eq i32 %fault, 0
  br i1 %made, label %detach, label %missing
detach:
  %number = load i64, ptr %thread
  %unused.2 = call i32 @pthread_detach(i64 %number)
  br label %started
missing:
  %unused.3 = atomicrmw sub ptr %job.{_RUNNING}, i64 1 seq_cst
  br label %started
started:
  %k.next = add i64 %k, 1
  %more = icmp slt i64 %k.next, %threads
  br i1 %more, label %start, label %done
done:
  ret void
}}
"""

_HELP: Final = f"""
define internal ptr @help(ptr %job) nounwind {{
{_words(_STOP, _RUNNING, _STARTED)}
  %block = alloca [{HEADER} x i64]
  %flag = getelementptr i64, ptr %block, i64 {FLAG}
  store ptr %job.{_STOP}, ptr %flag
  %before = atomicrmw add ptr %job.{_STARTED}, i64 1 seq_cst
  %who = add i64 %before, 1
  call void @work(ptr %job, ptr %block, i64 %who, i1 false)
  %last = atomicrmw sub ptr %job.{_RUNNING}, i64 1 seq_cst
  ret ptr null
}}
"""

_RUN: Final = f"""
define i64 @hf_parallel(
    ptr %block, ptr %function, ptr %cells, i64 %extent) nounwind {{
entry:
  %job = alloca [{_WORDS} x i64]
  %pause = alloca [2 x i64]
{_words(_FUNCTION, _CELLS, _EXTENT, _STOP, _FAILED, _RUNNING, _BEGAN)}
  call void @llvm.memset.p0.i64(ptr %job, i8 0, i64 {8 * _WORDS}, i1 false)
  store ptr %function, ptr %job.{_FUNCTION}
  store ptr %cells, ptr %job.{_CELLS}
  store i64 %extent, ptr %job.{_EXTENT}
  store i64 {NEVER}, ptr %job.{_FAILED}
  %now = call i64 @now()
  store i64 %now, ptr %job.{_BEGAN}
  store i64 0, ptr %pause
  %nanoseconds = getelementptr i64, ptr %pause, i64 1
  store i64 50000, ptr %nanoseconds
  %to.job = getelementptr i64, ptr %block, i64 {JOB}
  store ptr %job, ptr %to.job
  call void @work(ptr %job, ptr %block, i64 0, i1 true)
  store ptr null, ptr %to.job
  br label %wait
wait:
  %running = load atomic i64, ptr %job.{_RUNNING} seq_cst, align 8
  %joined = icmp eq i64 %running, 0
  br i1 %joined, label %finish, label %poll
poll:
  %stop = load atomic i64, ptr %job.{_STOP} seq_cst, align 8
  %going = icmp eq i64 %stop, 0
  br i1 %going, label %ask, label %sleep
ask:
  %signal = call preserve_mostcc i64 @hf_poll(ptr %block)
  %calm = icmp eq i64 %signal, 0
  br i1 %calm, label %sleep, label %halt
halt:
  store atomic i64 1, ptr %job.{_STOP} seq_cst, align 8
  br label %sleep
sleep:
  %unused = call i32 @nanosleep(ptr %pause, ptr null)
  br label %wait
finish:
  %stopped = load atomic i64, ptr %job.{_STOP} seq_cst, align 8
  %interrupted = icmp ne i64 %stopped, 0
  br i1 %interrupted, label %leave, label %ask.failed
ask.failed:
  %failed = load atomic i64, ptr %job.{_FAILED} seq_cst, align 8
  %good = icmp eq i64 %failed, {NEVER}
  br i1 %good, label %done, label %search
search:
  %k = phi i64 [ 0, %ask.failed ], [ %k.next, %other ]
  %offset = shl i64 %k, 2
  %place = add i64 %offset, {_REPORTS}
  %report = getelementptr i64, ptr %job, i64 %place
  %to.status = getelementptr i64, ptr %report, i64 1
  %begin = load i64, ptr %report
  %status = load i64, ptr %to.status
  %first = icmp eq i64 %begin, %failed
  %fails = icmp ne i64 %status, 0
  %found = and i1 %first, %fails
  br i1 %found, label %trap, label %other
other:
  %k.next = add i64 %k, 1
  br label %search
trap:
  %from = getelementptr i64, ptr %report, i64 2
  %values = load <2 x i64>, ptr %from, align 8
  %to = getelementptr i64, ptr %block, i64 {TRAP_VALUES}
  store <2 x i64> %values, ptr %to, align 8
  ret i64 %status
leave:
  ret i64 {INTERRUPTED}
done:
  ret i64 0
}}
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
"""

TEXT: Final = "\n".join((_WORK, _START, _HELP, _RUN))
