"""The memory of programs on the CPU: parameters, and buffers in the arena."""

from hopflow.compiler.llvm.memory import Memory
from hopflow.compiler.llvm.module import Function
from hopflow.loop_ir.expr import Buffer


class ProgramMemory(Memory):
    """The addresses of a program's buffers, in one function that has the program's
    block.

    A parameter starts at the address in a word of the block; a buffer of the arena
    starts at an offset from it. The root of a buffer, the word and the offset, is the
    same in all functions of the program.
    """

    def __init__(self, f: Function) -> None:
        super().__init__(f)
        self._roots: dict[Buffer, tuple[int, int]] = {}
        self.arena = ""  # the register with the start of the arena
        self._arena_slot = ""
        self.starts: list[str] = []  # lines before the first statement

    def place_by_root(self, buffer: Buffer, root: tuple[int, int]) -> None:
        """Set the start of `buffer` to `root`, of another function's memory."""
        self._roots[buffer] = root

    def place_by_word(self, buffer: Buffer, word: int) -> None:
        """Set the start of `buffer` to the address in this word of the block."""
        self._roots[buffer] = word, 0

    def place_in_arena(self, buffer: Buffer, offset: int) -> None:
        """Set the start of `buffer` to `offset` bytes after `arena`."""
        self._roots[buffer] = -1, offset

    def _computed(self, buffer: Buffer) -> str:
        """Emit the start of a buffer with a root, and return its register."""
        word, offset = self._roots[buffer]
        if word < 0:
            return self.f.emit(f"getelementptr i8, ptr {self.arena}, i64 {offset}")
        at = self.f.emit(f"getelementptr i64, ptr %block, i64 {word}")
        return self.f.emit(f"load ptr, ptr {at}")

    def root(self, buffer: Buffer) -> tuple[int, int] | None:
        """Return the root of `buffer`, if its start is the same in the whole program.

        It is a word of the block, or -1 for the arena, and the offset in bytes.
        """
        return self._roots.get(buffer)

    def start_of(self, word: str) -> str:
        """Return the address in the word of the block whose number is in a register.

        For -1 it is the start of the arena.
        """
        if self.arena and not self._arena_slot:
            self._arena_slot = self.f.slot("ptr", "arena.base")
        at = self.f.emit(f"getelementptr i64, ptr %block, i64 {word}")
        if self.arena:
            self.f.do(f"store ptr {self.arena}, ptr {self._arena_slot}")
            is_arena = self.f.emit(f"icmp slt i64 {word}, 0")
            slot = f"ptr {self._arena_slot}"
            at = self.f.emit(f"select i1 {is_arena}, {slot}, ptr {at}")
        return self.f.emit(f"load ptr, ptr {at}")

    def pointer(self, buffer: Buffer) -> str:
        if buffer in self._roots and buffer not in self._pointers:
            with self.f.hoisted(self.starts):  # most are arguments of calls only
                self.place(buffer, self._computed(buffer))
        return super().pointer(buffer)

    def pointer_again(self, buffer: Buffer) -> str:
        """Return the start of a buffer in a new register.

        A register that lives across many calls is spilled to the stack, which takes
        LLVM more time than all calls do.
        """
        return self._computed(buffer) if buffer in self._roots else self.pointer(buffer)
