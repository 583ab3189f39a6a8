"""Passes over kernel programs: each edits one in place; see `schedule`."""

from dataclasses import dataclass, field

from hopflow.compiler.layout import Layouts

__all__ = ["Context"]


@dataclass(frozen=True, slots=True)
class Context:
    """What passes are told of the program that they edit.

    reused    by the number of a result the parameter whose memory it is to take
    layouts   of the inputs that are no sizes; dense if it is empty
    """

    reused: dict[int, int] = field(default_factory=dict)
    layouts: Layouts = ()
