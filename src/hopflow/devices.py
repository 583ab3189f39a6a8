"""The devices whose memory can hold tensors."""

from typing import Final, NamedTuple


class Device(NamedTuple):
    """A device with memory.

    name    the name for users, as in `device="cpu"`
    dlpack  DLPack's type and id of the device
    """

    name: str
    dlpack: tuple[int, int]


CPU: Final = Device("cpu", (1, 0))  # kDLCPU
DEVICES: Final = (CPU,)
"""All devices; new tensors are on the first."""
