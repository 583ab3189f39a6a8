"""What operations and operators become in native code, as the table of targets says."""

from typing import Final

REFUSED: Final = {
    "cholesky": "potrf",
    "eigh": "syevd",
    "lu": "getrf",
    "qr": "geqrf",
    "svd": "gesdd",
    "triangular_solve": "trsm",
}
"""Operations that are factorisations, and LAPACK's routine of each."""


def operation(name: str) -> str:
    """The cell of an operation."""
    if name == "callback":
        return "*refused: it calls Python, which `hf.export` refuses*"
    if name in REFUSED:
        return f"*refused: LAPACK's `{REFUSED[name]}`*"
    return "compiled"


def operator(_name: str) -> str:
    """The cell of an operator: all are loops and branches."""
    return "compiled"
