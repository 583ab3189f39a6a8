"""The devices whose memory tensors can be in."""

from typing import Final, NamedTuple


class Device(NamedTuple):
    """A device with memory.

    name    what users call it, as in `device="cpu"`
    dlpack  what DLPack calls it: its kind, and its number
    """

    name: str
    dlpack: tuple[int, int]


CPU: Final = Device("cpu", (1, 0))  # kDLCPU
DEVICES: Final = (CPU,)
"""All that there are; the first is that of new tensors."""
