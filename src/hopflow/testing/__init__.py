"""Tools to test array programs, operators and backends: see docs/fuzzing.md."""

from hopflow.testing.checks import Disagreement, Report, check
from hopflow.testing.conformance import check_operator
from hopflow.testing.executions import ProgramExecution, register_execution
from hopflow.testing.program import Program
from hopflow.testing.program_text import from_text, to_text
from hopflow.testing.strategies import programs

__all__ = [
    "Disagreement",
    "Program",
    "ProgramExecution",
    "Report",
    "check",
    "check_operator",
    "from_text",
    "programs",
    "register_execution",
    "to_text",
]
