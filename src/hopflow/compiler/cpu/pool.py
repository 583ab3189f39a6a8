"""The native code that runs loops over threads, on the threads of a pool.

`hf_parallel` is passed a function of a range of iterations. The calling thread begins
with the first iterations. It lets other threads help once the rest will take several
times as long as it takes to wake them, or at once if iterations are known to take long:
a short loop costs no more than a call. Each thread repeatedly takes a stretch of
iterations, short enough that it returns now and then. The results do not depend on the
assignment of iterations to threads. A trap ends the loop as it does serially: the one
of the lowest iteration is reported. Only the first thread polls for Ctrl-C; the others
read its flag.

Loops of some tens of microseconds, as in the steps of a loop, are worth no waking. But
threads that have helped wait a while for the next loop before they sleep, and help it
from its beginning. So they are woken for a series of such loops, too: at its beginning
if the last one that began with the same loop was long enough. The time that an
iteration takes on one thread is kept by function: loops that take longer with help, as
on busy processors, run alone for many times what they have lost.

The helping threads are those of a pool. They are made when a loop first needs them, and
sleep between loops. One loop at a time has the pool; a loop within another one, and one
of another thread of the user, runs on its own thread alone. A loop gives out places: a
ticket has their number and the number of the loop in one word, so that a thread that
wakes late gets no place in a loop that has ended. A forked process makes threads anew.
The threads take no signals, which are for those of the user.

A helping thread that is woken may be put on the processor of the one that asks, where
it waits until that sleeps, and stays there. So the thread that asks takes its processor
off the set of those that the others may run on.
"""

import signal
import sys
from typing import Final

from hopflow.compiler.cpu.stubs import (
    FLAG,
    HEADER,
    INTERRUPTED,
    JOB,
    TRAP_VALUES,
)

MOST: Final = 64
"""The largest number of threads."""
SOON: Final = 20_000
"""Nanoseconds after which the time that the rest takes is estimated."""
WORTH: Final = 100_000
"""Nanoseconds that the rest must take for other threads to help. To wake them takes up
to 60,000, and a thread that waits for a busy processor costs millions."""
WORTH_OF_AWAKE: Final = 16_000
"""Nanoseconds that a loop must take on one thread for waiting threads to help."""
SERIES: Final = 1_000_000
"""Nanoseconds that loops may take, each of which begins within `SPIN` of the end of the
one before, until threads are woken for one that is too short for that alone: they then
wait for the next. To wake them takes the first thread up to 70,000."""
LONG_SERIES: Final = 250_000
"""Nanoseconds of a series on one thread for which threads are woken at its beginning,
if the last one that began with the same loop has taken as long."""
MOST_DOUBLED: Final = 5
"""Threads that were woken twice and did not save time are woken again after `SERIES`,
then after three times that time, seven times, and so on, up to so many times."""
LOST: Final = 100_000
"""Nanoseconds that loops may take longer with other threads than alone, less what they
save, before the processors are taken to be busy."""
MOST_LOST: Final = 8_000_000
"""Nanoseconds that one loop may lose, at most: iterations may just do more work."""
BUSY: Final = 4
"""How many times as long short loops run alone then."""
SPIN: Final = 50_000
"""Nanoseconds that a thread of the pool waits for the next loop before it sleeps, and
that the first thread waits for the others."""
SHORT: Final = 10_000
"""After a stretch that took fewer nanoseconds, the next is twice as long."""
LONG: Final = 100_000
"""After a stretch that took more nanoseconds, the next is half as long."""

# Words of a job, which all threads share. At the end, for each thread: the start of the
# stretch that failed, its status, and the two values of a trap.
(
    _FUNCTION,
    _CELLS,
    _EXTENT,
    _NEXT,  # the first iteration that no thread has taken
    _STOP,  # whether there was an interrupt
    _FAILED,  # the start of the first stretch that failed
    _PLACES,  # the number of places for other threads; 0 if the pool does not help
    _STARTED,  # the number of threads that have helped
    _BEGAN,  # the start time; `NEVER` once the pool was asked
    _WAKES,  # whether threads were woken for this loop
) = range(10)
_REPORTS: Final = 10
NEVER: Final = 2**63 - 1
"""Later than any time, and greater than any iteration."""
_WORDS: Final = _REPORTS + 4 * MOST

# Words of the pool.
(
    _OWNED,  # 1 while a loop has the pool
    _TICKET,  # the number of the loop, and in the last byte that of its free places
    _JOB,  # of the loop
    _FINISHED,  # how many threads have left their place
    _THREADS,  # how many threads were made
    _ASLEEP,  # how many sleep, or are about to
    _IS_MADE,  # whether the mutex and the condition variable are made
    FORKS,  # how often the process was forked from one that had the pool
    _ENDED,  # when the last loop has ended
    _MISSED,  # how long the loops of a series have run alone
    _BUSY,  # until when the processors are taken to be busy
    _LOST,  # how much time help has cost, less what it has saved
    _WOKEN,  # how often threads were woken since they have last saved time
    _NEXT_WAKE,  # from when on they may be woken for a series again
    _PROCESSOR,  # 1 + the number of the processor that other threads leave free; or 0
    FIRST,  # the address of the function of the first loop of a series
    TOTAL,  # the nanoseconds that the loops of the series take on one thread
) = range(17)
_MUTEX: Final = 17
_CONDITION: Final = 33
TIMES: Final = 49
"""The first word of a table of functions of iterations: the address of the function,
the picoseconds that an iteration takes on one thread, and the nanoseconds of the last
series that began with it, on one thread."""
_FUNCTION_BITS: Final = 6
"""The table has so many entries, to the power of 2; the place of a function is a hash
of its address."""
_HASH: Final = 0x9E3779B97F4A7C15 - (1 << 64)
"""2**64 over the golden ratio (Knuth, "The Art of Computer Programming", volume 3,
section 6.4): addresses of functions differ in few bits, as those of pages."""
_ENTRY_BITS: Final = 2
"""An entry has 4 words, the last of which is not used."""
HANDLES: Final = TIMES + (1 << _FUNCTION_BITS + _ENTRY_BITS)
"""The first word of the handles of the threads."""
POOL_WORDS: Final = HANDLES + MOST
"""Words of the pool: 16 each for the mutex and the condition variable are more than
they take on any system."""
_PLACE_BITS: Final = 8
_SIGNALS: Final = 128
"""The bytes of a set of signals: no system has larger ones."""
_PROCESSORS: Final = 1024
"""The processors of a set. The system refuses a set that is too small for its own."""
_HAS_AFFINITY: Final = sys.platform == "linux"
"""Whether threads may say on which processors they run."""


def _words(*words: int, of: str = "job") -> str:
    """Return lines with the addresses of words: of a job as `%job.0` and so on, of the
    pool as `%pool.0`."""
    base = "@hf_pool" if of == "pool" else f"%{of}"
    return "\n".join(
        f"  %{of}.{k} = getelementptr i64, ptr {base}, i64 {k}" for k in words
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
  br i1 %leads, label %call.help, label %measure
call.help:
  call void @ask_if_long(ptr %job)
  br label %measure
measure:
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
  %polled.next = phi i64 [ %polled, %measure ], [ %after, %poll ]
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
declare i32 @pthread_sigmask(i32, ptr, ptr)
declare i32 @pthread_mutex_init(ptr, ptr)
declare i32 @pthread_mutex_lock(ptr)
declare i32 @pthread_mutex_unlock(ptr)
declare i32 @pthread_cond_init(ptr, ptr)
declare i32 @pthread_cond_wait(ptr, ptr)
declare i32 @pthread_cond_broadcast(ptr)
declare i32 @nanosleep(ptr, ptr)
@hf_num_threads = external global i64
@hf_pool = external global i64

define internal void @ask_if_long(ptr %job) nounwind {{
entry:
{_words(_EXTENT, _NEXT, _BEGAN)}
{_words(_MISSED, _NEXT_WAKE, of="pool")}
  %began = load i64, ptr %job.{_BEGAN}
  %asked = icmp eq i64 %began, {NEVER}
  br i1 %asked, label %done, label %estimate
estimate:
  %now = call i64 @now()
  %elapsed = sub i64 %now, %began
  %extent = load i64, ptr %job.{_EXTENT}
  %next = load atomic i64, ptr %job.{_NEXT} seq_cst, align 8
  %left = sub i64 %extent, %next
  %elapsed.f = sitofp i64 %elapsed to double
  %next.f = sitofp i64 %next to double
  %left.f = sitofp i64 %left to double
  %each.f = fdiv double %elapsed.f, %next.f
  %rest.f = fmul double %each.f, %left.f
  %is.long = fcmp oge double %rest.f, {float(WORTH)}
  %is.sure = icmp sge i64 %elapsed, {SOON}
  %worth = and i1 %is.long, %is.sure
  br i1 %worth, label %ask, label %short
short:
  %is.near = fcmp oge double %rest.f, {float(WORTH_OF_AWAKE / 2)}
  %is.calm = call i1 @is_calm(i64 %now)
  %awake = call i1 @some_wait()
  %missed = load atomic i64, ptr %pool.{_MISSED} monotonic, align 8
  %next.wake = load atomic i64, ptr %pool.{_NEXT_WAKE} monotonic, align 8
  %is.long.series = icmp sge i64 %missed, {SERIES}
  %is.later = icmp sge i64 %now, %next.wake
  %is.series = and i1 %is.long.series, %is.later
  %reason = or i1 %awake, %is.series
  %may = and i1 %is.near, %is.calm
  %asks = and i1 %may, %reason
  br i1 %asks, label %ask, label %done
ask:
  call void @ask_for_help(ptr %job)
  br label %done
done:
  ret void
}}

define internal void @ask_for_help(ptr %job) nounwind {{
entry:
{_words(_PLACES, _BEGAN, _WAKES)}
{_words(*range(_IS_MADE + 1), _WOKEN, _NEXT_WAKE, _PROCESSOR, of="pool")}
{_words(_MUTEX, _CONDITION, HANDLES, of="pool")}
  %thread = alloca i64
  %all = alloca i8, i64 {_SIGNALS}, align 8
  %old = alloca i8, i64 {_SIGNALS}, align 8
  %wanted = load i64, ptr @hf_num_threads
  %threads = call i64 @llvm.smin.i64(i64 %wanted, i64 {MOST})
  %places = sub i64 %threads, 1
  %several = icmp sgt i64 %places, 0
  br i1 %several, label %claim, label %done
claim:
  %pair = cmpxchg ptr %pool.{_OWNED}, i64 0, i64 1 seq_cst seq_cst, align 8
  %is.mine = extractvalue {{ i64, i1 }} %pair, 1
  br i1 %is.mine, label %own, label %done
own:
  store i64 {NEVER}, ptr %job.{_BEGAN}
  %is.made = load i64, ptr %pool.{_IS_MADE}
  %made = icmp ne i64 %is.made, 0
  br i1 %made, label %prepare, label %make
make:
  %unused.0 = call i32 @pthread_mutex_init(ptr %pool.{_MUTEX}, ptr null)
  %unused.1 = call i32 @pthread_cond_init(ptr %pool.{_CONDITION}, ptr null)
  store i64 1, ptr %pool.{_IS_MADE}
  br label %prepare
prepare:
  store ptr %job, ptr %pool.{_JOB}
  store i64 0, ptr %pool.{_FINISHED}
  %ticket = load atomic i64, ptr %pool.{_TICKET} seq_cst, align 8
  %loop = lshr i64 %ticket, {_PLACE_BITS}
  %seen = inttoptr i64 %loop to ptr
  %count.0 = load i64, ptr %pool.{_THREADS}
  %enough.0 = icmp sge i64 %count.0, %places
  br i1 %enough.0, label %part, label %mask
mask:
  call void @llvm.memset.p0.i64(ptr %all, i8 -1, i64 {_SIGNALS}, i1 false)
  %unused.6 = call i32 @pthread_sigmask(i32 {int(signal.SIG_BLOCK)}, ptr %all, ptr %old)
  br label %grow
grow:
  %count = load i64, ptr %pool.{_THREADS}
  %enough = icmp sge i64 %count, %places
  br i1 %enough, label %unmask, label %create
create:
  %fault = call i32 @pthread_create(ptr %thread, ptr null, ptr @serve, ptr %seen)
  %created = icmp eq i32 %fault, 0
  br i1 %created, label %detach, label %unmask
unmask:
  %unused.7 = call i32 @pthread_sigmask(
      i32 {int(signal.SIG_SETMASK)}, ptr %old, ptr null)
  br label %part
detach:
  %number = load i64, ptr %thread
  %unused.2 = call i32 @pthread_detach(i64 %number)
  %to.handle = getelementptr i64, ptr %pool.{HANDLES}, i64 %count
  store i64 %number, ptr %to.handle
  store i64 0, ptr %pool.{_PROCESSOR}
  %count.next = add i64 %count, 1
  store i64 %count.next, ptr %pool.{_THREADS}
  br label %grow
part:
  call void @keep_apart(i1 false)
  br label %publish
publish:
  store i64 %places, ptr %job.{_PLACES}
  %loop.next = add i64 %loop, 1
  %high = shl i64 %loop.next, {_PLACE_BITS}
  %ticket.next = or i64 %high, %places
  store atomic i64 %ticket.next, ptr %pool.{_TICKET} seq_cst, align 8
  %asleep = load atomic i64, ptr %pool.{_ASLEEP} seq_cst, align 8
  %some.sleep = icmp sgt i64 %asleep, 0
  br i1 %some.sleep, label %wake, label %done
wake:
  store i64 1, ptr %job.{_WAKES}
  %woken = atomicrmw add ptr %pool.{_WOKEN}, i64 1 monotonic
  %doubled = call i64 @llvm.smin.i64(i64 %woken, i64 {MOST_DOUBLED})
  %rests.0 = shl i64 {SERIES}, %doubled
  %rests = sub i64 %rests.0, {SERIES}
  %now = call i64 @now()
  %next.wake = add i64 %now, %rests
  store atomic i64 %next.wake, ptr %pool.{_NEXT_WAKE} monotonic, align 8
  call void @keep_apart(i1 true)
  %unused.3 = call i32 @pthread_mutex_lock(ptr %pool.{_MUTEX})
  %unused.4 = call i32 @pthread_cond_broadcast(ptr %pool.{_CONDITION})
  %unused.5 = call i32 @pthread_mutex_unlock(ptr %pool.{_MUTEX})
  br label %done
done:
  ret void
}}
"""

# A thread of the pool; `%first` is the number of the last loop that it does not serve.
_SERVE: Final = f"""
define internal ptr @serve(ptr %first) nounwind {{
entry:
{_words(_TICKET, _JOB, _FINISHED, _ASLEEP, _MUTEX, _CONDITION, of="pool")}
  %before = ptrtoint ptr %first to i64
  br label %wait
wait:
  %seen = phi i64 [ %before, %entry ], [ %loop.2, %served ]
  %since = call i64 @now()
  br label %spin
spin:
  %ticket.0 = load atomic i64, ptr %pool.{_TICKET} seq_cst, align 8
  %loop.0 = lshr i64 %ticket.0, {_PLACE_BITS}
  %same.0 = icmp eq i64 %loop.0, %seen
  br i1 %same.0, label %idle, label %join
idle:
  %now = call i64 @now()
  %waited = sub i64 %now, %since
  %long = icmp sge i64 %waited, {SPIN}
  br i1 %long, label %sleep, label %spin
sleep:
  %unused.0 = call i32 @pthread_mutex_lock(ptr %pool.{_MUTEX})
  %unused.1 = atomicrmw add ptr %pool.{_ASLEEP}, i64 1 seq_cst
  br label %check
check:
  %ticket.1 = load atomic i64, ptr %pool.{_TICKET} seq_cst, align 8
  %loop.1 = lshr i64 %ticket.1, {_PLACE_BITS}
  %same.1 = icmp eq i64 %loop.1, %seen
  br i1 %same.1, label %rest, label %awake
rest:
  %unused.2 = call i32 @pthread_cond_wait(
      ptr %pool.{_CONDITION}, ptr %pool.{_MUTEX})
  br label %check
awake:
  %unused.3 = atomicrmw sub ptr %pool.{_ASLEEP}, i64 1 seq_cst
  %unused.4 = call i32 @pthread_mutex_unlock(ptr %pool.{_MUTEX})
  br label %join
join:
  %ticket.2 = load atomic i64, ptr %pool.{_TICKET} seq_cst, align 8
  %loop.2 = lshr i64 %ticket.2, {_PLACE_BITS}
  %free = and i64 %ticket.2, {(1 << _PLACE_BITS) - 1}
  %is.free = icmp ne i64 %free, 0
  br i1 %is.free, label %take, label %served
take:
  %ticket.3 = sub i64 %ticket.2, 1
  %pair = cmpxchg ptr %pool.{_TICKET}, i64 %ticket.2, i64 %ticket.3 seq_cst seq_cst
  %taken = extractvalue {{ i64, i1 }} %pair, 1
  br i1 %taken, label %help, label %join
help:
  %job = load ptr, ptr %pool.{_JOB}
  call void @help(ptr %job)
  %unused.5 = atomicrmw add ptr %pool.{_FINISHED}, i64 1 seq_cst
  br label %served
served:
  br label %wait
}}

define internal void @help(ptr %job) nounwind {{
{_words(_STOP, _STARTED)}
  %block = alloca [{HEADER} x i64]
  %flag = getelementptr i64, ptr %block, i64 {FLAG}
  store ptr %job.{_STOP}, ptr %flag
  %before = atomicrmw add ptr %job.{_STARTED}, i64 1 seq_cst
  %who = add i64 %before, 1
  call void @work(ptr %job, ptr %block, i64 %who, i1 false)
  ret void
}}
"""

_SET: Final = f"<{_PROCESSORS // 64} x i64>"
"""A set of processors, as a vector."""
_AFFINITY: Final = f"""
declare i32 @sched_getcpu()
declare i32 @sched_getaffinity(i32, i64, ptr)
declare i32 @pthread_setaffinity_np(i64, i64, ptr)
declare i64 @llvm.vector.reduce.or.v{_PROCESSORS // 64}i64({_SET})

; Let the threads of the pool run on the processors of this thread, but not on the one
; that it is on. To know that takes little; to tell the threads, some microseconds. They
; are told where they were told last that this thread was on another one; before they
; are woken always, since the processors that it may run on may be others.
define internal void @keep_apart(i1 %always) nounwind {{
entry:
{_words(_THREADS, _PROCESSOR, HANDLES, of="pool")}
  %set = alloca {_SET}, align 64
  %number = call i32 @sched_getcpu()
  %bit = zext i32 %number to i64
  %processor = add i64 %bit, 1
  %last = load i64, ptr %pool.{_PROCESSOR}
  %is.other = icmp ne i64 %processor, %last
  %is.known = icmp ult i64 %bit, {_PROCESSORS}
  %is.due = or i1 %is.other, %always
  %moves = and i1 %is.due, %is.known
  br i1 %moves, label %choose, label %done
choose:
  store i64 0, ptr %pool.{_PROCESSOR}
  store {_SET} zeroinitializer, ptr %set
  %unused.0 = call i32 @sched_getaffinity(i32 0, i64 {_PROCESSORS // 8}, ptr %set)
  %word = lshr i64 %bit, 6
  %place = and i64 %bit, 63
  %flag = shl i64 1, %place
  %others = xor i64 %flag, -1
  %to = getelementptr i64, ptr %set, i64 %word
  %old = load i64, ptr %to
  %new = and i64 %old, %others
  store i64 %new, ptr %to
  %rest = load {_SET}, ptr %set
  %any = call i64 @llvm.vector.reduce.or.v{_PROCESSORS // 64}i64({_SET} %rest)
  %some = icmp ne i64 %any, 0
  %threads = load i64, ptr %pool.{_THREADS}
  %has.threads = icmp sgt i64 %threads, 0
  %tells = and i1 %some, %has.threads
  br i1 %tells, label %keep, label %done
keep:
  store i64 %processor, ptr %pool.{_PROCESSOR}
  br label %tell
tell:
  %k = phi i64 [ 0, %keep ], [ %k.next, %tell ]
  %to.handle = getelementptr i64, ptr %pool.{HANDLES}, i64 %k
  %handle = load i64, ptr %to.handle
  %unused.1 = call i32 @pthread_setaffinity_np(
      i64 %handle, i64 {_PROCESSORS // 8}, ptr %set)
  %k.next = add i64 %k, 1
  %more = icmp slt i64 %k.next, %threads
  br i1 %more, label %tell, label %done
done:
  ret void
}}
"""
_NO_AFFINITY: Final = """
define internal void @keep_apart(i1 %always) nounwind {
  ret void
}
"""

# Whether help pays. The words are shared by all loops of the process, and each of them
# is an estimate: they are read and written without an order.
_BALANCE: Final = f"""
define internal i1 @some_wait() nounwind {{
{_words(_THREADS, _ASLEEP, of="pool")}
  %threads = load atomic i64, ptr %pool.{_THREADS} monotonic, align 8
  %asleep = load atomic i64, ptr %pool.{_ASLEEP} monotonic, align 8
  %awake = icmp sgt i64 %threads, %asleep
  ret i1 %awake
}}

define internal i1 @is_calm(i64 %now) nounwind {{
{_words(_BUSY, of="pool")}
  %busy = load atomic i64, ptr %pool.{_BUSY} monotonic, align 8
  %calm = icmp sge i64 %now, %busy
  ret i1 %calm
}}

define internal ptr @entry_of(ptr %function) nounwind {{
  %address = ptrtoint ptr %function to i64
  %hash = mul i64 %address, {_HASH}
  %number = lshr i64 %hash, {64 - _FUNCTION_BITS}
  %place = shl i64 %number, {_ENTRY_BITS}
  %word = add i64 %place, {TIMES}
  %entry = getelementptr i64, ptr @hf_pool, i64 %word
  ret ptr %entry
}}

; The nanoseconds that a loop takes on one thread; 0: they are not known.
define internal i64 @time_alone(ptr %function, i64 %extent) nounwind {{
  %entry = call ptr @entry_of(ptr %function)
  %to.each = getelementptr i64, ptr %entry, i64 1
  %address = ptrtoint ptr %function to i64
  %known = load atomic i64, ptr %entry monotonic, align 8
  %each = load atomic i64, ptr %to.each monotonic, align 8
  %is.known = icmp eq i64 %known, %address
  %all = mul i64 %each, %extent
  %nanoseconds = sdiv i64 %all, 1000
  %time = select i1 %is.known, i64 %nanoseconds, i64 0
  ret i64 %time
}}

; Keep the time of a loop on one thread. One that is longer than before may be that of a
; thread that had to wait.
define internal void @keep_time(ptr %function, i64 %extent, i64 %took) nounwind {{
entry:
  %entry.of = call ptr @entry_of(ptr %function)
  %to.each = getelementptr i64, ptr %entry.of, i64 1
  %address = ptrtoint ptr %function to i64
  %known = load atomic i64, ptr %entry.of monotonic, align 8
  %old = load atomic i64, ptr %to.each monotonic, align 8
  %is.known = icmp eq i64 %known, %address
  %all = mul i64 %took, 1000
  %count = call i64 @llvm.smax.i64(i64 %extent, i64 1)
  %new = sdiv i64 %all, %count
  %eighth = lshr i64 %old, 3
  %more = add i64 %old, %eighth
  %least = call i64 @llvm.smin.i64(i64 %new, i64 %more)
  %each = select i1 %is.known, i64 %least, i64 %new
  store atomic i64 %address, ptr %entry.of monotonic, align 8
  store atomic i64 %each, ptr %to.each monotonic, align 8
  br i1 %is.known, label %done, label %reset
reset:
  %to.series = getelementptr i64, ptr %entry.of, i64 2
  store atomic i64 0, ptr %to.series monotonic, align 8
  br label %done
done:
  ret void
}}

; Begin a series with this function. The nanoseconds that the last one that began with
; it took on one thread; 0: they are not known.
define internal i64 @begin_series(ptr %function) nounwind {{
{_words(FIRST, TOTAL, of="pool")}
  %address = ptrtoint ptr %function to i64
  store atomic i64 %address, ptr %pool.{FIRST} monotonic, align 8
  store atomic i64 0, ptr %pool.{TOTAL} monotonic, align 8
  %entry = call ptr @entry_of(ptr %function)
  %to.series = getelementptr i64, ptr %entry, i64 2
  %known = load atomic i64, ptr %entry monotonic, align 8
  %last = load atomic i64, ptr %to.series monotonic, align 8
  %is.known = icmp eq i64 %known, %address
  %series = select i1 %is.known, i64 %last, i64 0
  ret i64 %series
}}

; Add the time that a loop takes on one thread to that of its series.
define internal void @extend_series(i64 %time) nounwind {{
entry:
{_words(FIRST, TOTAL, of="pool")}
  %before = load atomic i64, ptr %pool.{TOTAL} monotonic, align 8
  %total = add i64 %before, %time
  store atomic i64 %total, ptr %pool.{TOTAL} monotonic, align 8
  %address = load atomic i64, ptr %pool.{FIRST} monotonic, align 8
  %function = inttoptr i64 %address to ptr
  %entry.of = call ptr @entry_of(ptr %function)
  %to.series = getelementptr i64, ptr %entry.of, i64 2
  %known = load atomic i64, ptr %entry.of monotonic, align 8
  %is.known = icmp eq i64 %known, %address
  br i1 %is.known, label %keep, label %done
keep:
  store atomic i64 %total, ptr %to.series monotonic, align 8
  br label %done
done:
  ret void
}}

; Add what help has cost a loop, and take the processors to be busy if that is too much.
define internal void @balance(i64 %began, i64 %ended, i64 %expected) nounwind {{
{_words(_BUSY, _LOST, _WOKEN, of="pool")}
  %took = sub i64 %ended, %began
  %difference = sub i64 %took, %expected
  %change = call i64 @llvm.smin.i64(i64 %difference, i64 {MOST_LOST})
  %before = load atomic i64, ptr %pool.{_LOST} monotonic, align 8
  %sum = add i64 %before, %change
  %lost = call i64 @llvm.smax.i64(i64 %sum, i64 0)
  %is.busy = icmp sge i64 %lost, {LOST}
  %kept = select i1 %is.busy, i64 0, i64 %lost
  store atomic i64 %kept, ptr %pool.{_LOST} monotonic, align 8
  %saves = icmp slt i64 %change, 0
  br i1 %saves, label %saved, label %compare
saved:
  store atomic i64 0, ptr %pool.{_WOKEN} monotonic, align 8
  br label %compare
compare:
  br i1 %is.busy, label %rest, label %done
rest:
  %pause = mul i64 %lost, {BUSY}
  %until = add i64 %ended, %pause
  store atomic i64 %until, ptr %pool.{_BUSY} monotonic, align 8
  br label %done
done:
  ret void
}}
"""

_RUN: Final = f"""
define i64 @hf_parallel(
    ptr %block, ptr %function, ptr %cells, i64 %extent, i1 %is.long) nounwind {{
  %is.single = icmp eq i64 %extent, 1
  br i1 %is.single, label %single, label %several
single:
  %only = call i64 %function(ptr %block, ptr %cells, i64 0, i64 1)
  ret i64 %only
several:
  %all = call i64 @share(
      ptr %block, ptr %function, ptr %cells, i64 %extent, i1 %is.long)
  ret i64 %all
}}

define internal i64 @share(
    ptr %block, ptr %function, ptr %cells, i64 %extent, i1 %is.long)
    noinline nounwind {{
entry:
  %job = alloca [{_WORDS} x i64]
  %pause = alloca [2 x i64]
{_words(_FUNCTION, _CELLS, _EXTENT, _STOP, _FAILED, _PLACES, _BEGAN, _WAKES)}
{_words(_OWNED, _TICKET, _FINISHED, FORKS, _ENDED, _MISSED, _NEXT_WAKE, of="pool")}
  %forks = load i64, ptr %pool.{FORKS}
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
  %outer = load ptr, ptr %to.job
  store ptr %job, ptr %to.job
  %ended = load atomic i64, ptr %pool.{_ENDED} monotonic, align 8
  %gap = sub i64 %now, %ended
  %is.next = icmp slt i64 %gap, {SPIN}
  %missed = load atomic i64, ptr %pool.{_MISSED} monotonic, align 8
  %series = select i1 %is.next, i64 %missed, i64 0
  store atomic i64 %series, ptr %pool.{_MISSED} monotonic, align 8
  br i1 %is.next, label %choose, label %first
first:
  %last = call i64 @begin_series(ptr %function)
  br label %choose
choose:
  %predicted = phi i64 [ 0, %entry ], [ %last, %first ]
  %expected = call i64 @time_alone(ptr %function, i64 %extent)
  %awake = call i1 @some_wait()
  %is.calm = call i1 @is_calm(i64 %now)
  %is.worth = icmp sge i64 %expected, {WORTH_OF_AWAKE}
  %again.0 = and i1 %is.next, %awake
  %again.1 = and i1 %is.calm, %is.worth
  %again = and i1 %again.0, %again.1
  %next.wake = load atomic i64, ptr %pool.{_NEXT_WAKE} monotonic, align 8
  %may.wake = icmp sge i64 %now, %next.wake
  %is.series.0 = icmp sge i64 %predicted, {LONG_SERIES}
  %is.series.1 = and i1 %is.series.0, %may.wake
  %is.series = and i1 %is.series.1, %is.calm
  %asks.0 = or i1 %is.long, %again
  %asks = or i1 %asks.0, %is.series
  br i1 %asks, label %call.help, label %run
call.help:
  call void @ask_for_help(ptr %job)
  br label %run
run:
  call void @work(ptr %job, ptr %block, i64 0, i1 true)
  store ptr %outer, ptr %to.job
  %places = load i64, ptr %job.{_PLACES}
  %end = call i64 @now()
  %took = sub i64 %end, %now
  %is.alone = icmp eq i64 %places, 0
  br i1 %is.alone, label %alone, label %close
alone:
  call void @keep_time(ptr %function, i64 %extent, i64 %took)
  call void @extend_series(i64 %took)
  %missed.next = add i64 %series, %took
  store atomic i64 %missed.next, ptr %pool.{_MISSED} monotonic, align 8
  store atomic i64 %end, ptr %pool.{_ENDED} monotonic, align 8
  br label %finish
close:
  %ticket = atomicrmw and ptr %pool.{_TICKET}, i64 -{1 << _PLACE_BITS} seq_cst
  %free = and i64 %ticket, {(1 << _PLACE_BITS) - 1}
  %taken = sub i64 %places, %free
  br label %wait
wait:
  %forks.now = load i64, ptr %pool.{FORKS}
  %is.child = icmp ne i64 %forks.now, %forks
  br i1 %is.child, label %child, label %count
child:
  %error = call i64 @forked(ptr %block)
  ret i64 %error
count:
  %finished = load atomic i64, ptr %pool.{_FINISHED} seq_cst, align 8
  %joined = icmp eq i64 %finished, %taken
  %time = call i64 @now()
  %waited = sub i64 %time, %end
  br i1 %joined, label %joins, label %spin
joins:
  %alone.took = call i64 @llvm.smax.i64(i64 %expected, i64 %took)
  call void @extend_series(i64 %alone.took)
  store atomic i64 %time, ptr %pool.{_ENDED} monotonic, align 8
  store atomic i64 0, ptr %pool.{_MISSED} monotonic, align 8
  %wakes = load i64, ptr %job.{_WAKES}
  %is.waking = icmp ne i64 %wakes, 0
  %is.unknown = icmp eq i64 %expected, 0
  %is.open = or i1 %is.waking, %is.unknown
  br i1 %is.open, label %release, label %compare
compare:
  call void @balance(i64 %now, i64 %time, i64 %expected)
  br label %release
release:
  store atomic i64 0, ptr %pool.{_OWNED} seq_cst, align 8
  br label %finish
spin:
  %is.soon = icmp slt i64 %waited, {SPIN}
  br i1 %is.soon, label %wait, label %poll
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
  %is.first = icmp eq i64 %begin, %failed
  %fails = icmp ne i64 %status, 0
  %found = and i1 %is.first, %fails
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

TEXT: Final = "\n".join(
    (
        *(_WORK, _START, _SERVE, _BALANCE, _RUN),
        _AFFINITY if _HAS_AFFINITY else _NO_AFFINITY,
    )
)
