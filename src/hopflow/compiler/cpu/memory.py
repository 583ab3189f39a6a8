"""Buffers of a program on the CPU: its parameters, and those in its arena."""

from hopflow.compiler.llvm.memory import Memory
from hopflow.compiler.llvm.module import Function
from hopflow.loop_ir.expr import Buffer


class ProgramMemory(Memory):
    """The addresses of a program's buffers, within one function that has its block.

    Where a parameter begins is a word of the block; what is in the arena begins so many
    bytes behind it. Both are the same in all functions of the program: the root of a
    buffer says which.
    """

    def __init__(self, f: Function) -> None:
        super().__init__(f)
        self._roots: dict[Buffer, tuple[int, int]] = {}
        self.arena = ""  # the register that holds where it begins
        self._arena_slot = ""
        self.starts: list[str] = []  # lines, before the first statement

    def place_by_root(self, buffer: Buffer, root: tuple[int, int]) -> None:
        """Say that `buffer` begins where `root` of another function's memory says."""
        self._roots[buffer] = root

    def place_by_word(self, buffer: Buffer, word: int) -> None:
        """Say that `buffer` begins where this word of the program's block says."""
        self._roots[buffer] = word, 0

    def place_in_arena(self, buffer: Buffer, offset: int) -> None:
        """Say that `buffer` begins so many bytes behind `arena`."""
        self._roots[buffer] = -1, offset

    def _found(self, buffer: Buffer) -> str:
        """The register that holds the beginning of a buffer with a root, found here."""
        word, offset = self._roots[buffer]
        if word < 0:
            return self.f.emit(f"getelementptr i8, ptr {self.arena}, i64 {offset}")
        at = self.f.emit(f"getelementptr i64, ptr %block, i64 {word}")
        return self.f.emit(f"load ptr, ptr {at}")

    def root(self, buffer: Buffer) -> tuple[int, int] | None:
        """From where `buffer` begins, if it is so for the whole program: a word of the
        block or -1, which is the arena; and the bytes from there."""
        return self._roots.get(buffer)

    def start_of(self, word: str) -> str:
        """The address that the word of the block holds whose number is in a register,
        or the arena's for -1."""
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
            with self.f.hoisted(self.starts):  # most are given to calls alone
                self.place(buffer, self._found(buffer))
        return super().pointer(buffer)

    def pointer_again(self, buffer: Buffer) -> str:
        """The same, found here anew: a register that many calls stand between would be
        kept on the stack meanwhile, which costs LLVM more time than all calls do."""
        return self._found(buffer) if buffer in self._roots else self.pointer(buffer)
