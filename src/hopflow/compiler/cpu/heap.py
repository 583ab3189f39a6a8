"""Where a program has memory from whose size only the run knows: kinds of heaps.

A heap emits its calls into a function that has the program's `%block`. Sizes are
multiples of `reuse.ALIGNMENT`, and so are addresses, except in guarded memory.
"""

from typing import Final

from hopflow.compiler.cpu.stubs import ROOM, WORKSPACE
from hopflow.compiler.llvm.module import OPAQUE, Function
from hopflow.compiler.reuse import ALIGNMENT


class Heap:
    """The heap of the C library, or of others who have the same functions.

    aligned      the parameters before the size: what addresses are multiples of
    functions    the names of those that allocate, reallocate and free memory
    """

    aligned: tuple[int, ...] = (ALIGNMENT,)
    functions: tuple[str, str, str] = "aligned_alloc", "realloc", "free"

    def allocate(self, f: Function, size: str) -> str:
        """Return a register with the address of `size` bytes; null: there are none."""
        name = self.functions[0]
        parameters = ", ".join("i64" for _ in (*self.aligned, size))
        arguments = ", ".join(f"i64 {x}" for x in (*self.aligned, size))
        f.module.external(f"ptr @{name}({parameters})")
        return f.emit(f"call ptr @{name}({arguments})")

    def reallocate(
        self,
        f: Function,
        pointer: str,
        old: str,  # noqa: ARG002
        size: str,
    ) -> str:
        """Return memory as `allocate` does, with the contents of `pointer`.

        It frees `pointer`, which may be null, and has `old` bytes.
        """
        name = self.functions[1]
        f.module.external(f"ptr @{name}(ptr, i64)")
        return f.emit(f"call ptr @{name}(ptr {pointer}, i64 {size})")

    def free(self, f: Function, pointer: str) -> None:
        """Free memory of `allocate` or `reallocate`; `pointer` may be null."""
        name = self.functions[2]
        f.module.external(f"void @{name}(ptr)")
        f.do(f"call void @{name}(ptr {pointer})")

    def take(self, f: Function, size: str) -> str:
        """Return memory as `allocate` does, which the function has until it ends."""
        return self.allocate(f, size)

    def give(self, f: Function, pointer: str) -> None:
        """Free memory of `take`; `pointer` may be null."""
        self.free(f, pointer)

    def mark(self, f: Function) -> str:  # noqa: ARG002
        """Emit, at the start of a function, what `release` needs; return its name."""
        return ""

    def release(self, f: Function, mark: str) -> None:
        """Give back, at the end of a function, what has no owner but the heap."""


class KeptHeap(Heap):
    """The heap of the C library; the arena of a function that has ended is kept for the
    next one, by `stubs`. Else each call could get pages from the system anew, which
    costs as much as to write them several times."""

    def take(self, f: Function, size: str) -> str:
        f.module.external("noalias ptr @hf_take_arena(i64)", OPAQUE)
        return f.emit(f"call ptr @hf_take_arena(i64 {size})")

    def give(self, f: Function, pointer: str) -> None:
        f.module.external("void @hf_give_arena(ptr)", OPAQUE)
        f.do(f"call void @hf_give_arena(ptr {pointer})")


class GuardedHeap(Heap):
    """Memory of `compiler.cpu.guarded`: it ends with its last byte, and so may begin at
    any address."""

    aligned = ()
    functions = "hf_guarded_alloc", "hf_guarded_realloc", "hf_guarded_free"


class Workspace(Heap):
    """Memory that the caller of the program gives, for programs without a heap.

    It is handed out from its start on. What a function has taken is free again when the
    function ends; what grows takes new memory, unless it is what was taken last. Since
    sizes double, this is at most about four times of what is used in the end.
    """

    def allocate(self, f: Function, size: str) -> str:
        f.module.define("hf.allocate", _ALLOCATE)
        return f.emit(f"call ptr @hf.allocate(ptr %block, i64 {size})")

    def reallocate(self, f: Function, pointer: str, old: str, size: str) -> str:
        f.module.define("hf.allocate", _ALLOCATE)
        f.module.define("hf.reallocate", _REALLOCATE)
        f.module.declare("void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)")
        arguments = f"ptr %block, ptr {pointer}, i64 {old}, i64 {size}"
        return f.emit(f"call ptr @hf.reallocate({arguments})")

    def free(self, f: Function, pointer: str) -> None:
        """Do nothing: see `release`."""

    def mark(self, f: Function) -> str:
        name = f"%{f.name('mark')}"
        f.do(f"{name}.to = getelementptr i64, ptr %block, i64 {WORKSPACE}")
        f.do(f"{name}.to.room = getelementptr i64, ptr %block, i64 {ROOM}")
        f.do(f"{name} = load ptr, ptr {name}.to")
        f.do(f"{name}.room = load i64, ptr {name}.to.room")
        return name

    def release(self, f: Function, mark: str) -> None:
        f.do(f"store ptr {mark}, ptr {mark}.to")
        f.do(f"store i64 {mark}.room, ptr {mark}.to.room")


_ALLOCATE: Final = f"""
define internal noalias ptr @hf.allocate(ptr %block, i64 %size) noinline nounwind {{
entry:
  %to.start = getelementptr i64, ptr %block, i64 {WORKSPACE}
  %to.room = getelementptr i64, ptr %block, i64 {ROOM}
  %room = load i64, ptr %to.room
  %fits = icmp ule i64 %size, %room
  br i1 %fits, label %take, label %none
take:
  %start = load ptr, ptr %to.start
  %end = getelementptr i8, ptr %start, i64 %size
  %left = sub i64 %room, %size
  store ptr %end, ptr %to.start
  store i64 %left, ptr %to.room
  ret ptr %start
none:
  ret ptr null
}}
"""
_REALLOCATE: Final = f"""
define internal ptr @hf.reallocate(ptr %block, ptr %pointer, i64 %old, i64 %size)
    noinline nounwind {{
entry:
  %end = getelementptr i8, ptr %pointer, i64 %old
  %to.free = getelementptr i64, ptr %block, i64 {WORKSPACE}
  %free = load ptr, ptr %to.free
  %is.last = icmp eq ptr %end, %free
  br i1 %is.last, label %extend, label %move
extend:
  %more = sub i64 %size, %old
  %added = call ptr @hf.allocate(ptr %block, i64 %more)
  %fails = icmp eq ptr %added, null
  %same = select i1 %fails, ptr null, ptr %pointer
  ret ptr %same
move:
  %new = call ptr @hf.allocate(ptr %block, i64 %size)
  %none = icmp eq ptr %new, null
  br i1 %none, label %done, label %copy
copy:
  call void @llvm.memcpy.p0.p0.i64(ptr %new, ptr %pointer, i64 %old, i1 false)
  br label %done
done:
  ret ptr %new
}}
"""
