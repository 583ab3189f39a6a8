"""The cache of compiled kernels, bounded by the memory that they take."""

from collections import OrderedDict
from collections.abc import Hashable

from hopflow.compiler.cpu.runtime import Kernel
from hopflow.config import config
from hopflow.stats import counts


class KernelCache:
    """Kernels by key; the least recently used are evicted first.

    Together they take at most `config.kernel_cache_bytes` of memory. An evicted kernel
    lives as long as a caller holds it. The cache takes no lock.
    """

    def __init__(self) -> None:
        self._kernels: OrderedDict[Hashable, Kernel] = OrderedDict()
        self._bytes = 0

    def find(self, key: Hashable) -> Kernel | None:
        """Return the kernel of `key`, which becomes the most recently used one."""
        kernel = self._kernels.get(key)
        if kernel is not None:
            self._kernels.move_to_end(key)
        return kernel

    def add(self, key: Hashable, kernel: Kernel) -> None:
        """Add a kernel under a new key, and evict others to make room for it."""
        self._kernels[key] = kernel
        self._bytes += kernel.nbytes
        while self._kernels and self._bytes > config.kernel_cache_bytes:
            _, evicted = self._kernels.popitem(last=False)
            self._bytes -= evicted.nbytes
            counts.evictions += 1

    def clear(self) -> None:
        self._kernels.clear()
        self._bytes = 0
