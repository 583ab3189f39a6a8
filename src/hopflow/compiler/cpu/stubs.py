"""The native code that all programs share: the entry, polling, and calls of Python.

A program receives one block of words: the header below, then its parameters. The entry
fills it from Python ints, and from NumPy arrays, of which it takes the address of the
data (to ask NumPy for it takes ten times as long as the call). The code is compiled
once in a process, and adds nothing to the size of a program.
"""

import sys
import time
from typing import Final

from hopflow.compiler.reuse import ALIGNMENT
from hopflow.progress import INTERVAL
from hopflow.tensor.aligned import DATA_AT

# Words of the header.
THREAD_STATE: Final = 0  # Python's, while the GIL is released; else 0
EPOCH: Final = 1  # the number of calls of `interrupt` when the program began
POLLED_AT: Final = 2  # the time of the last poll, in nanoseconds
TRAP_VALUES: Final = 3  # two words
FLAG: Final = 5  # in a helping thread the address of its stop flag
JOB: Final = 6  # in the leading thread the job of the parallel loop that it runs, or 0
HOST: Final = 7  # the callable of a `HostCall`
TOLD: Final = 8  # two words for each site: the time of its report, and whether an end
HEADER: Final = 9  # the number of words before the parameters
# The first two words of a program that is not called from Python.
WORKSPACE: Final = 0  # the address of the memory that is free
ROOM: Final = 1  # the number of its bytes

# The status of a program that is neither 0 nor, from 1 on, `site + 1` of a trap.
INTERRUPTED: Final = -1
OUT_OF_MEMORY: Final = -2

MOST_KEPT: Final = 1 << 27
"""The bytes of the largest arena that a process keeps; it keeps one."""

POLL_EVERY: Final = 50_000_000
"""Nanoseconds. To take the GIL more often is slow beside a thread that holds it."""

TICK_EVERY: Final = int(INTERVAL * 1e9)
"""Nanoseconds between two reports of the progress of a loop."""

# Offsets in CPython's objects: the type, then the fields of NumPy's array struct, and
# the item size in the struct of a dtype.
TYPE_AT: Final = object.__basicsize__ - 8
NDIM_AT: Final = DATA_AT + 8
EXTENTS_AT: Final = DATA_AT + 16
STRIDES_AT: Final = DATA_AT + 24
DTYPE_AT: Final = DATA_AT + 40
FLAGS_AT: Final = DATA_AT + 48
ITEMSIZE_AT: Final = object.__basicsize__ + 24
DENSE_FLAG: Final = 1  # NPY_ARRAY_C_CONTIGUOUS

# For each parameter the table of expected arguments has NUMBER; or the number of axes,
# the item size in bytes, and the kind of the entries that follow.
NUMBER: Final = -1
DENSE: Final = 0  # the extent of each axis
STRIDED: Final = 1  # the extents, then the strides in elements

CLOCK: Final = time.CLOCK_MONOTONIC


def _string(name: str, text: str) -> str:
    return f'@{name} = internal constant [{len(text) + 1} x i8] c"{text}\\00"'


_STRINGS: Final = (
    _string(".misfit", "a native entry of %lld ints was called with %lld"),
    _string(
        ".unlike",
        "argument %lld of a native program is no array of the dtype, the sizes and the "
        "layout that the program was made for. This is a defect of hopflow, not of "
        "your program: please report it with the program.",
    ),
    _string(
        ".forked",
        "this process was forked within a loop over threads, whose other threads it "
        "does not have. Fork where no compiled code runs.",
    ),
    _string(".trap", "LLL"),
    _string(".epoch", "L"),
    _string(".host", "LLL"),
)
_DECLARATIONS: Final = """
@Py_None = external global i8
@PyExc_TypeError = external global ptr
@hf_poll_callable = external global i8
@hf_epoch = external global i64
@hf_ndarray = external global i8
@hf_bounds_error = external global i8
@hf_fork_error = external global i8
declare ptr @PyBytes_AsString(ptr)
declare i64 @PyLong_AsLong(ptr)
declare ptr @PyErr_Occurred()
declare ptr @PyErr_Format(ptr, ptr, ...)
declare ptr @PyErr_NoMemory()
declare i32 @PyErr_CheckSignals()
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
declare ptr @PyObject_CallFunction(ptr, ptr, ...)
declare ptr @Py_BuildValue(ptr, ...)
declare void @Py_IncRef(ptr)
declare void @Py_DecRef(ptr)
declare i32 @clock_gettime(i32, ptr)
declare noalias ptr @aligned_alloc(i64, i64)
declare void @free(ptr)
"""

# Tests whether an array agrees with the table: its number of axes, its item size, its
# extents, and its strides or that it is dense. The table has each of these as a number,
# or as ~k if it is word k of the program's parameters.
_COMPARE: Final = f"""
define internal i64 @expected(ptr %words, i64 %entry) nounwind {{
  %is.word = icmp slt i64 %entry, 0
  br i1 %is.word, label %word, label %number
number:
  ret i64 %entry
word:
  %number.of = xor i64 %entry, -1
  %at = getelementptr i64, ptr %words, i64 %number.of
  %value = load i64, ptr %at
  ret i64 %value
}}

define internal i1 @alike(
    ptr %table, ptr %words, ptr %found, i64 %count, i64 %scale) nounwind {{
entry:
  br label %head
head:
  %i = phi i64 [ 0, %entry ], [ %next, %same ]
  %done = icmp sge i64 %i, %count
  br i1 %done, label %yes, label %each
each:
  %from = getelementptr i64, ptr %table, i64 %i
  %coded = load i64, ptr %from
  %plain = call i64 @expected(ptr %words, i64 %coded)
  %wanted = mul i64 %plain, %scale
  %to.given = getelementptr i64, ptr %found, i64 %i
  %given = load i64, ptr %to.given
  %next = add i64 %i, 1
  %is.same = icmp eq i64 %wanted, %given
  br i1 %is.same, label %same, label %no
same:
  br label %head
yes:
  ret i1 true
no:
  ret i1 false
}}

define internal i1 @fits(ptr %table, ptr %words, ptr %array) nounwind {{
entry:
  %axes = load i64, ptr %table
  %to.itemsize = getelementptr i64, ptr %table, i64 1
  %itemsize = load i64, ptr %to.itemsize
  %to.layout = getelementptr i64, ptr %table, i64 2
  %layout = load i64, ptr %to.layout
  %extents = getelementptr i64, ptr %table, i64 3
  %to.ndim = getelementptr i8, ptr %array, i64 {NDIM_AT}
  %ndim.32 = load i32, ptr %to.ndim
  %ndim = sext i32 %ndim.32 to i64
  %same.ndim = icmp eq i64 %ndim, %axes
  %to.dtype = getelementptr i8, ptr %array, i64 {DTYPE_AT}
  %dtype = load ptr, ptr %to.dtype
  %to.size = getelementptr i8, ptr %dtype, i64 {ITEMSIZE_AT}
  %size = load i64, ptr %to.size
  %same.size = icmp eq i64 %size, %itemsize
  %same = and i1 %same.ndim, %same.size
  br i1 %same, label %sizes, label %no
sizes:
  %to.extents = getelementptr i8, ptr %array, i64 {EXTENTS_AT}
  %found.extents = load ptr, ptr %to.extents
  %same.extents = call i1 @alike(
      ptr %extents, ptr %words, ptr %found.extents, i64 %axes, i64 1)
  br i1 %same.extents, label %memory, label %no
memory:
  %is.dense = icmp eq i64 %layout, {DENSE}
  br i1 %is.dense, label %dense, label %strided
dense:
  %to.flags = getelementptr i8, ptr %array, i64 {FLAGS_AT}
  %flags = load i32, ptr %to.flags
  %flag = and i32 %flags, {DENSE_FLAG}
  %is.contiguous = icmp ne i32 %flag, 0
  ret i1 %is.contiguous
strided:
  %strides = getelementptr i64, ptr %extents, i64 %axes
  %to.strides = getelementptr i8, ptr %array, i64 {STRIDES_AT}
  %found.strides = load ptr, ptr %to.strides
  %same.strides = call i1 @alike(
      ptr %strides, ptr %words, ptr %found.strides, i64 %axes, i64 %itemsize)
  ret i1 %same.strides
no:
  ret i1 false
}}
"""

# `self` is bytes: the address of the program, the number of its parameters, the address
# of the callable for its calls of Python, and the table of expected arguments.
_ENTRY: Final = f"""
define ptr @hf_entry(ptr %self, ptr %args, i64 %given) nounwind {{
entry:
  %head = call ptr @PyBytes_AsString(ptr %self)
  %program = load ptr, ptr %head
  %second = getelementptr i64, ptr %head, i64 1
  %wanted = load i64, ptr %second
  %fits = icmp eq i64 %given, %wanted
  br i1 %fits, label %begin, label %misfit
misfit:
  %kind = load ptr, ptr @PyExc_TypeError
  call ptr (ptr, ptr, ...) @PyErr_Format(
      ptr %kind, ptr @.misfit, i64 %wanted, i64 %given)
  ret ptr null
begin:
  %words = add i64 %wanted, {HEADER}
  %block = alloca i64, i64 %words, align 16
  store i64 0, ptr %block
  %epoch = load atomic i64, ptr @hf_epoch monotonic, align 8
  %to.epoch = getelementptr i64, ptr %block, i64 {EPOCH}
  store i64 %epoch, ptr %to.epoch
  %to.clock = getelementptr i64, ptr %block, i64 {POLLED_AT}
  store i64 0, ptr %to.clock
  %to.trap = getelementptr i64, ptr %block, i64 {TRAP_VALUES}
  store <2 x i64> zeroinitializer, ptr %to.trap, align 8
  %to.flag = getelementptr i64, ptr %block, i64 {FLAG}
  store ptr null, ptr %to.flag
  %to.job = getelementptr i64, ptr %block, i64 {JOB}
  store ptr null, ptr %to.job
  %third = getelementptr i64, ptr %head, i64 2
  %host = load i64, ptr %third
  %fourth = getelementptr i64, ptr %head, i64 3
  %table = load ptr, ptr %fourth
  %to.host = getelementptr i64, ptr %block, i64 {HOST}
  store i64 %host, ptr %to.host
  %to.words = getelementptr i64, ptr %block, i64 {HEADER}
  %some = icmp sgt i64 %wanted, 0
  br i1 %some, label %each, label %run
each:
  %i = phi i64 [ 0, %begin ], [ %next, %good ]
  %from = getelementptr ptr, ptr %args, i64 %i
  %object = load ptr, ptr %from
  %to.type = getelementptr i8, ptr %object, i64 {TYPE_AT}
  %type = load ptr, ptr %to.type
  %is.array = icmp eq ptr %type, @hf_ndarray
  br i1 %is.array, label %array, label %number
array:
  %to.data = getelementptr i8, ptr %object, i64 {DATA_AT}
  %data = load i64, ptr %to.data
  br label %good
number:
  %number.word = call i64 @PyLong_AsLong(ptr %object)
  %doubtful = icmp eq i64 %number.word, -1
  br i1 %doubtful, label %doubt, label %good
doubt:
  %raised = call ptr @PyErr_Occurred()
  %is.good = icmp eq ptr %raised, null
  br i1 %is.good, label %good, label %failed
good:
  %word = phi i64 [ %data, %array ], [ %number.word, %number ], [ %number.word, %doubt ]
  %to = getelementptr i64, ptr %to.words, i64 %i
  store i64 %word, ptr %to
  %next = add nuw nsw i64 %i, 1
  %more = icmp slt i64 %next, %wanted
  br i1 %more, label %each, label %compare
compare:
  %j = phi i64 [ 0, %good ], [ %j.next, %passed ]
  %at = phi i64 [ 0, %good ], [ %at.next, %passed ]
  %row = getelementptr i64, ptr %table, i64 %at
  %axes = load i64, ptr %row
  %is.number = icmp eq i64 %axes, {NUMBER}
  br i1 %is.number, label %passed, label %sized
sized:
  %to.layout = getelementptr i64, ptr %row, i64 2
  %layout = load i64, ptr %to.layout
  %lists = add i64 %layout, 1
  %entries = mul i64 %axes, %lists
  %length = add i64 %entries, 3
  %from.j = getelementptr ptr, ptr %args, i64 %j
  %object.j = load ptr, ptr %from.j
  %to.type.j = getelementptr i8, ptr %object.j, i64 {TYPE_AT}
  %type.j = load ptr, ptr %to.type.j
  %is.array.j = icmp eq ptr %type.j, @hf_ndarray
  br i1 %is.array.j, label %ask, label %passed
ask:
  %same = call i1 @fits(ptr %row, ptr %to.words, ptr %object.j)
  br i1 %same, label %passed, label %unlike
passed:
  %advance = phi i64 [ 1, %compare ], [ %length, %sized ], [ %length, %ask ]
  %at.next = add i64 %at, %advance
  %j.next = add nuw nsw i64 %j, 1
  %more.j = icmp slt i64 %j.next, %wanted
  br i1 %more.j, label %compare, label %run
unlike:
  %unlike.result = call ptr (ptr, ptr, ...) @PyErr_Format(
      ptr @hf_bounds_error, ptr @.unlike, i64 %j)
  ret ptr null
run:
  %status = call i64 %program(ptr %block)
  %state = load ptr, ptr %block
  %released = icmp ne ptr %state, null
  br i1 %released, label %restore, label %back
restore:
  call void @PyEval_RestoreThread(ptr %state)
  br label %back
back:
  %is.done = icmp eq i64 %status, 0
  br i1 %is.done, label %done, label %stopped
done:
  {"call void @Py_IncRef(ptr @Py_None)" if sys.version_info < (3, 12) else ""}
  ret ptr @Py_None
stopped:
  %is.trap = icmp sgt i64 %status, 0
  br i1 %is.trap, label %trap, label %error
trap:
  %site = sub i64 %status, 1
  %v0 = load i64, ptr %to.trap
  %to.v1 = getelementptr i64, ptr %to.trap, i64 1
  %v1 = load i64, ptr %to.v1
  %result = call ptr (ptr, ...) @Py_BuildValue(ptr @.trap, i64 %site, i64 %v0, i64 %v1)
  ret ptr %result
error:
  %is.memory = icmp eq i64 %status, {OUT_OF_MEMORY}
  br i1 %is.memory, label %memory, label %failed
memory:
  %nothing = call ptr @PyErr_NoMemory()
  ret ptr null
failed:
  ret ptr null
}}
"""

_POLL: Final = f"""
define internal i64 @now() nounwind {{
  %time = alloca [2 x i64]
  %unused = call i32 @clock_gettime(i32 {CLOCK}, ptr %time)
  %seconds = load i64, ptr %time
  %to.rest = getelementptr i64, ptr %time, i64 1
  %rest = load i64, ptr %to.rest
  %scaled = mul i64 %seconds, 1000000000
  %sum = add i64 %scaled, %rest
  ret i64 %sum
}}

define i64 @hf_clock_i64(ptr %to) nounwind {{
  %now = call i64 @now()
  store i64 %now, ptr %to
  ret i64 0
}}

define void @hf_release(ptr %block) nounwind {{
  %now = call i64 @now()
  %to.clock = getelementptr i64, ptr %block, i64 {POLLED_AT}
  store i64 %now, ptr %to.clock
  %state = call ptr @PyEval_SaveThread()
  store ptr %state, ptr %block
  ret void
}}

define preserve_mostcc i64 @hf_poll(ptr %block) nounwind {{
entry:
  %to.flag = getelementptr i64, ptr %block, i64 {FLAG}
  %flag = load ptr, ptr %to.flag
  %leads = icmp eq ptr %flag, null
  br i1 %leads, label %lead, label %help
lead:
  %to.job = getelementptr i64, ptr %block, i64 {JOB}
  %job = load ptr, ptr %to.job
  %is.alone = icmp eq ptr %job, null
  br i1 %is.alone, label %begin, label %call.help
call.help:
  call void @ask_if_long(ptr %job)
  br label %begin
help:
  %told = load atomic i64, ptr %flag seq_cst, align 8
  ret i64 %told
begin:
  %now = call i64 @now()
  %to.clock = getelementptr i64, ptr %block, i64 {POLLED_AT}
  %last = load i64, ptr %to.clock
  %elapsed = sub i64 %now, %last
  %early = icmp slt i64 %elapsed, {POLL_EVERY}
  br i1 %early, label %on, label %look
on:
  ret i64 0
look:
  store i64 %now, ptr %to.clock
  %state = load ptr, ptr %block
  %released = icmp ne ptr %state, null
  br i1 %released, label %restore, label %check
restore:
  call void @PyEval_RestoreThread(ptr %state)
  br label %check
check:
  %signal = call i32 @PyErr_CheckSignals()
  %calm = icmp eq i32 %signal, 0
  br i1 %calm, label %ask, label %stop
ask:
  %to.epoch = getelementptr i64, ptr %block, i64 {EPOCH}
  %epoch = load i64, ptr %to.epoch
  %answer = call ptr (ptr, ptr, ...) @PyObject_CallFunction(
      ptr @hf_poll_callable, ptr @.epoch, i64 %epoch)
  %raised = icmp eq ptr %answer, null
  br i1 %raised, label %stop, label %go
go:
  call void @Py_DecRef(ptr %answer)
  br i1 %released, label %save, label %on
save:
  %again = call ptr @PyEval_SaveThread()
  store ptr %again, ptr %block
  br label %on
stop:
  store ptr null, ptr %block
  ret i64 1
}}
"""

# One arena is kept for the next call. Its size stands in the cache line before it.
_ARENA: Final = f"""
@hf_kept = external global ptr

define noalias ptr @hf_take_arena(i64 %size) nounwind {{
entry:
  %kept = atomicrmw xchg ptr @hf_kept, ptr null acq_rel
  %is.none = icmp eq ptr %kept, null
  br i1 %is.none, label %allocate, label %test
test:
  %room = load i64, ptr %kept
  %fits = icmp ule i64 %size, %room
  br i1 %fits, label %take, label %drop
drop:
  call void @free(ptr %kept)
  br label %allocate
allocate:
  %whole = add i64 %size, {ALIGNMENT}
  %new = call ptr @aligned_alloc(i64 {ALIGNMENT}, i64 %whole)
  %failed = icmp eq ptr %new, null
  br i1 %failed, label %fail, label %note
note:
  store i64 %size, ptr %new
  br label %take
take:
  %base = phi ptr [ %kept, %test ], [ %new, %note ]
  %start = getelementptr i8, ptr %base, i64 {ALIGNMENT}
  ret ptr %start
fail:
  ret ptr null
}}

define void @hf_give_arena(ptr %start) nounwind {{
entry:
  %is.none = icmp eq ptr %start, null
  br i1 %is.none, label %end, label %some
some:
  %base = getelementptr i8, ptr %start, i64 -{ALIGNMENT}
  %room = load i64, ptr %base
  %is.large = icmp ugt i64 %room, {MOST_KEPT}
  br i1 %is.large, label %drop, label %keep
keep:
  %other = atomicrmw xchg ptr @hf_kept, ptr %base acq_rel
  br label %drop
drop:
  %dropped = phi ptr [ %base, %some ], [ %other, %keep ]
  call void @free(ptr %dropped)
  br label %end
end:
  ret void
}}
"""

# The end of a loop over threads in a process that was forked within it.
_FORKED: Final = f"""
define internal i64 @forked(ptr %block) nounwind {{
  %state = load ptr, ptr %block
  %released = icmp ne ptr %state, null
  br i1 %released, label %restore, label %raise
restore:
  call void @PyEval_RestoreThread(ptr %state)
  br label %raise
raise:
  call ptr (ptr, ptr, ...) @PyErr_Format(ptr @hf_fork_error, ptr @.forked)
  store ptr null, ptr %block
  ret i64 {INTERRUPTED}
}}
"""

# Python looks for Ctrl-C itself, and the callable for `interrupt`.
_CALL: Final = f"""
define i64 @hf_call(ptr %block, i64 %site, ptr %words) nounwind {{
entry:
  %state = load ptr, ptr %block
  %released = icmp ne ptr %state, null
  br i1 %released, label %restore, label %call
restore:
  call void @PyEval_RestoreThread(ptr %state)
  br label %call
call:
  %to.host = getelementptr i64, ptr %block, i64 {HOST}
  %host = load ptr, ptr %to.host
  %to.epoch = getelementptr i64, ptr %block, i64 {EPOCH}
  %epoch = load i64, ptr %to.epoch
  %answer = call ptr (ptr, ptr, ...) @PyObject_CallFunction(
      ptr %host, ptr @.host, i64 %site, ptr %words, i64 %epoch)
  %raised = icmp eq ptr %answer, null
  br i1 %raised, label %stop, label %go
go:
  call void @Py_DecRef(ptr %answer)
  br i1 %released, label %save, label %on
save:
  %again = call ptr @PyEval_SaveThread()
  store ptr %again, ptr %block
  br label %on
on:
  ret i64 0
stop:
  store ptr null, ptr %block
  ret i64 1
}}
"""

# `ends` is 1 for the end of a loop, and 2 for the end of an outermost loop of its
# function, which is always reported the first time. Helping threads report nothing.
_TICK: Final = f"""
define preserve_mostcc i64 @hf_tick(
    ptr %block, i64 %site, i64 %done, i64 %total, i64 %ends) nounwind {{
entry:
  %words = alloca [2 x i64]
  %to.flag = getelementptr i64, ptr %block, i64 {FLAG}
  %flag = load ptr, ptr %to.flag
  %helps = icmp ne ptr %flag, null
  %is.all = icmp eq i64 %done, %total
  %is.step = icmp eq i64 %ends, 0
  %is.told = and i1 %is.all, %is.step
  %is.quiet = or i1 %helps, %is.told
  br i1 %is.quiet, label %on, label %look
look:
  %to.told = getelementptr i64, ptr %block, i64 {TOLD}
  %told = load ptr, ptr %to.told
  %to.clock = getelementptr [2 x i64], ptr %told, i64 %site
  %to.ended = getelementptr i64, ptr %to.clock, i64 1
  %now = call i64 @now()
  %last = load i64, ptr %to.clock
  %elapsed = sub i64 %now, %last
  %is.late = icmp sge i64 %elapsed, {TICK_EVERY}
  %ended = load i64, ptr %to.ended
  %is.end = icmp sgt i64 %ends, %ended
  %always = icmp eq i64 %ends, 2
  %is.first = and i1 %is.end, %always
  %tells = or i1 %is.late, %is.first
  br i1 %tells, label %tell, label %on
tell:
  store i64 %now, ptr %to.clock
  %latest = call i64 @llvm.smax.i64(i64 %ended, i64 %ends)
  store i64 %latest, ptr %to.ended
  store i64 %done, ptr %words
  %to.total = getelementptr i64, ptr %words, i64 1
  store i64 %total, ptr %to.total
  %status = call i64 @hf_call(ptr %block, i64 %site, ptr %words)
  ret i64 %status
on:
  ret i64 0
}}
"""

TEXT: Final = "\n".join(
    (*_STRINGS, _DECLARATIONS, _COMPARE, _ENTRY, _POLL, _ARENA, _FORKED, _CALL, _TICK)
)
PYTHON: Final = (
    "PyBytes_AsString PyLong_AsLong PyErr_Occurred PyErr_Format PyErr_NoMemory "
    "PyErr_CheckSignals PyEval_SaveThread PyEval_RestoreThread PyObject_CallFunction "
    "Py_BuildValue Py_IncRef Py_DecRef PyExc_TypeError"
).split()
"""The names of Python's C API that the text uses, besides `Py_None`."""
