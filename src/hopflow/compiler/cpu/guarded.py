"""Memory between guard pages, for `hf.config.guard_pages`.

Each block ends where a page ends, and the next page is closed: an access one element
past the end ends the process at that instruction (run Python with `-X faulthandler` to
see the Python stack). The memory is not zeroed but filled with poison, as the reference
interpreter's is.
"""

import ctypes
import mmap
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np

from hopflow.compiler.cpu.jit import Linked, c_symbols, link, once, shared_code
from hopflow.compiler.cpu.target import CpuTarget
from hopflow.compiler.interface import Interface
from hopflow.compiler.owned import owned_array

NDArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_PAGE: Final = mmap.PAGESIZE
_OPEN, _CLOSED = mmap.PROT_READ | mmap.PROT_WRITE, 0
_FLAGS: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_POISON: Final = 0xFF

# A block is a page with the total size and the requested size, a closed page, the
# memory with slack before it, and a closed page.
_TEXT: Final = f"""
declare ptr @mmap(ptr, i64, i32, i32, i32, i64)
declare i32 @mprotect(ptr, i64, i32)
declare i32 @munmap(ptr, i64)
declare i64 @llvm.umin.i64(i64, i64)
declare i64 @llvm.umax.i64(i64, i64)
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)

define ptr @hf_guarded_alloc(i64 %asked) nounwind {{
entry:
  %size = call i64 @llvm.umax.i64(i64 %asked, i64 1)
  %more = add i64 %size, {_PAGE - 1}
  %room = and i64 %more, {-_PAGE}
  %total = add i64 %room, {3 * _PAGE}
  %base = call ptr @mmap(ptr null, i64 %total, i32 {_OPEN}, i32 {_FLAGS}, i32 -1, i64 0)
  %address = ptrtoint ptr %base to i64
  %failed = icmp eq i64 %address, -1
  br i1 %failed, label %none, label %found
none:
  ret ptr null
found:
  store i64 %total, ptr %base
  %to.size = getelementptr i64, ptr %base, i64 1
  store i64 %size, ptr %to.size
  %before = getelementptr i8, ptr %base, i64 {_PAGE}
  %inner = getelementptr i8, ptr %before, i64 {_PAGE}
  %after = getelementptr i8, ptr %inner, i64 %room
  call void @llvm.memset.p0.i64(ptr %inner, i8 {_POISON}, i64 %room, i1 false)
  %unused = call i32 @mprotect(ptr %before, i64 {_PAGE}, i32 {_CLOSED})
  %unused.too = call i32 @mprotect(ptr %after, i64 {_PAGE}, i32 {_CLOSED})
  %slack = sub i64 %room, %size
  %result = getelementptr i8, ptr %inner, i64 %slack
  ret ptr %result
}}

define internal ptr @head(ptr %memory) nounwind {{
entry:
  %address = ptrtoint ptr %memory to i64
  %page = and i64 %address, {-_PAGE}
  %start = sub i64 %page, {2 * _PAGE}
  %base = inttoptr i64 %start to ptr
  ret ptr %base
}}

define void @hf_guarded_free(ptr %memory) nounwind {{
entry:
  %nothing = icmp eq ptr %memory, null
  br i1 %nothing, label %done, label %some
some:
  %base = call ptr @head(ptr %memory)
  %total = load i64, ptr %base
  %unused = call i32 @munmap(ptr %base, i64 %total)
  ret void
done:
  ret void
}}

define ptr @hf_guarded_realloc(ptr %old, i64 %size) nounwind {{
entry:
  %new = call ptr @hf_guarded_alloc(i64 %size)
  %nothing = icmp eq ptr %old, null
  %failed = icmp eq ptr %new, null
  %done = or i1 %nothing, %failed
  br i1 %done, label %end, label %move
move:
  %base = call ptr @head(ptr %old)
  %to.size = getelementptr i64, ptr %base, i64 1
  %had = load i64, ptr %to.size
  %both = call i64 @llvm.umin.i64(i64 %had, i64 %size)
  call void @llvm.memcpy.p0.p0.i64(ptr %new, ptr %old, i64 %both, i1 false)
  call void @hf_guarded_free(ptr %old)
  br label %end
end:
  ret ptr %new
}}
"""
SYMBOLS: Final = ("hf_guarded_alloc", "hf_guarded_free", "hf_guarded_realloc")
"""The replacements of C's `aligned_alloc`, `free` and `realloc`."""


@once
def library(target: CpuTarget) -> Linked:
    """Return the allocator, compiled once for a target."""
    names = ("mmap", "mprotect", "munmap", "memset", "memcpy")
    symbols = {name: c_symbols()[name] for name in names}
    return link([shared_code(_TEXT, target)], SYMBOLS, symbols, target)


@once
def _allocate(target: CpuTarget) -> Callable[[int], int | None]:
    return ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int64)(
        library(target)["hf_guarded_alloc"]
    )


@once
def free(target: CpuTarget) -> Callable[[int], None]:
    """Return the function that frees memory of `SYMBOLS`, by its address."""
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(library(target)["hf_guarded_free"])


def copied(array: NDArray, target: CpuTarget) -> NDArray:
    """Return a copy of an array, with its strides, in memory between guard pages."""
    low, high = np.lib.array_utils.byte_bounds(array)
    size = high - low if array.size else 0
    address = _allocate(target)(size)
    if address is None:
        raise MemoryError(f"no room for {size} bytes between closed pages")
    ctypes.memmove(address, low, size)
    memory = owned_array(np.array([address, size]), np.dtype(np.uint8), free(target))
    first = array.__array_interface__["data"][0] - low if array.size else 0
    copy: NDArray = np.ndarray(
        array.shape, array.dtype, memory, first, array.strides if array.size else None
    )
    return copy


def calling(
    function: Callable[..., Any], program: Interface, target: CpuTarget
) -> Callable[..., Any]:
    """Return the native function of `program`, for copies of arrays between guard
    pages.

    It copies the outputs back. Elements of outputs that it does not write are poison.
    """
    parameters = [*program.sizes, *program.inputs, *program.outputs]
    outputs = [k for k, b in enumerate(parameters) if b in program.outputs]
    fresh = [k for k in outputs if parameters[k] not in program.inputs]

    def call(*args: Any) -> Any:
        copies = [copied(a, target) if isinstance(a, np.ndarray) else a for a in args]
        for k in fresh:
            copies[k].reshape(-1).view(np.uint8).fill(_POISON)
        try:
            return function(*copies)
        finally:
            for k in outputs:
                args[k][...] = copies[k]

    return call
