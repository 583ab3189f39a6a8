"""Settings, read when they are used; assign to change: `hf.config.verify = True`."""

import os
from dataclasses import dataclass, field


def _flag(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0")


@dataclass(slots=True)
class Config:
    """The process's settings.

    verify              run the verifiers of every IR between all passes
    print_width         columns that printed graphs may take
    kernel_cache_size   native programs kept for new traces of equal graphs; the one not
                        asked for the longest goes first
    """

    verify: bool = field(default_factory=lambda: _flag("HOPFLOW_VERIFY"))
    print_width: int = 100
    kernel_cache_size: int = 4096


config = Config()
