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
WRITTEN_OUT: Final = ("cholesky", "lu", "triangular_solve")
"""Those that call LAPACK for more than three rows only."""


def operation(name: str) -> str:
    """The cell of an operation."""
    if name == "callback":
        return "*refused: it calls Python, which `hf.export` refuses*"
    if name in REFUSED:
        cell = f"*refused: LAPACK's `{REFUSED[name]}`*"
        return f"compiled up to 3 rows; else {cell}" if name in WRITTEN_OUT else cell
    return "compiled"


def operator(_name: str) -> str:
    """The cell of an operator: all are loops and branches."""
    return "compiled"
