"""Passes over kernel programs: each edits one in place; see `schedule`."""

from dataclasses import dataclass, field

from hopflow.compiler.layout import Layouts

__all__ = ["Context"]


@dataclass(frozen=True, slots=True)
class Context:
    """What passes need to know about the program that they edit.

    reused    by the number of a result, the parameter whose memory it takes
    layouts   of the inputs that are not sizes; dense if it is empty
    """

    reused: dict[int, int] = field(default_factory=dict)
    layouts: Layouts = ()
