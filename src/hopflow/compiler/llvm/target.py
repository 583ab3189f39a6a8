"""The properties of a machine that LLVM needs, for every kind of machine."""

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class LlvmTarget:
    """A machine, as LLVM names it and its features, for example "+avx2,-avx512f"."""

    triple: str
    layout: str
    cpu: str
    features: str

    def has(self, feature: str) -> bool:
        return f"+{feature}" in _split(self.features)


@cache
def _split(features: str) -> frozenset[str]:
    return frozenset(features.split(","))
