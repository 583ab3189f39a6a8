"""What operations and operators become as WebAssembly, for the table of targets."""

from typing import Final

from tests.targets import native

REFUSED: Final = native.REFUSED
WITH_REMAINDERS: Final = ("remainder", "floor_divide")
"""Operations that leave something to JavaScript."""


def operation(name: str) -> str:
    """The cell of an operation."""
    if name in WITH_REMAINDERS:
        return "compiled, with `%` of JavaScript"
    return native.operation(name)


def operator(name: str) -> str:
    """The cell of an operator."""
    return native.operator(name)
