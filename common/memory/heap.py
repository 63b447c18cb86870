"""Return freed memory that malloc keeps to the system, before it counts against a budget."""

import ctypes

import psutil


def return_free_memory() -> None:
    """Return free memory of the heap to the system, where the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Heap:
    """Keeps free memory in this process's heap from piling up.

    Tensors of a few MiB that come and go leave holes that glibc does not return: 100 to 200 MiB while a hundred blocks
    compute one after the other in 35 MiB, see docs/experiments.md. Returning them costs page faults, so it is done only
    when they are many.

    Args:
        slack: bytes by which the process may grow in between. Whatever stays must have been allocated before.
    """

    def __init__(self, slack: int) -> None:
        self._slack, self._process = slack, psutil.Process()
        self._least = self._resident()

    def trim(self) -> None:
        """Return free memory to the system, if the process has grown by more than the slack. Costs 20 us otherwise."""
        if self._resident() > self._least + self._slack:
            return_free_memory()
            self._least = self._resident()

    def _resident(self) -> int:
        return int(self._process.memory_info().rss)
