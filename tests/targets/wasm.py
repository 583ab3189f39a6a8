"""What operations and operators become as WebAssembly, for the table of targets."""

from typing import Final

REFUSED: Final = {
    "cholesky": "potrf",
    "eigh": "syevd_values",
    "lu": "getrf",
    "qr": "geqrf_orgqr",
    "svd": "gesdd_values",
    "triangular_solve": "trsm",
}
"""Operations that are factorisations, and LAPACK's routine of each."""
WITH_REMAINDERS: Final = ("remainder", "floor_divide")
"""Operations that leave something to JavaScript."""


def operation(name: str) -> str:
    """The cell of an operation."""
    if name == "callback":
        return "*refused: it calls Python, which `hf.export` refuses*"
    if name in REFUSED:
        return f"*refused: LAPACK's `{REFUSED[name]}`*"
    return "compiled, with `%` of JavaScript" if name in WITH_REMAINDERS else "compiled"


def operator(_: str) -> str:
    """The cell of an operator."""
    return "compiled"
