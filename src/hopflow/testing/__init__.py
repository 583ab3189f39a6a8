"""What a test of array programs needs, ours or a user's: see docs/fuzzing.md."""

import importlib
from typing import TYPE_CHECKING, Any

from hopflow.testing.checks import Disagreement, Report, check
from hopflow.testing.conformance import check_operator
from hopflow.testing.meanings import ProgramMeaning, register_meaning
from hopflow.testing.program import Program
from hopflow.testing.program_text import from_text, to_text

if TYPE_CHECKING:
    from hopflow.testing.strategies import programs

__all__ = [
    "Disagreement",
    "Program",
    "ProgramMeaning",
    "Report",
    "check",
    "check_operator",
    "from_text",
    "programs",
    "register_meaning",
    "to_text",
]


def __getattr__(name: str) -> Any:
    # Strategies need Hypothesis, which the package does not.
    if name == "programs":
        return importlib.import_module("hopflow.testing.strategies").programs
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
