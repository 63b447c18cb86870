"""What malloc keeps of what was freed, given back before it counts."""

import ctypes
import mmap
from pathlib import Path

_STATM = Path("/proc/self/statm")


def return_free_memory() -> None:
    """Give what is free in the heap back to the system, where the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Heap:
    """Keeps this process's heap from growing by what is free in it.

    Tensors of a few MiB that come and go leave holes that glibc does not return: 100 to 200 MiB while a hundred blocks
    compute one after the other in 35 MiB, see docs/experiments.md. Returning them costs page faults, so it is done only
    when they are many.

    Args:
        slack: bytes by which the process may grow in between. All that is allocated for good must be there already.
    """

    def __init__(self, slack: int) -> None:
        self._slack = slack
        self._least = self._resident()

    def trim(self) -> None:
        """Give back what is free, if the process has grown by more than the slack. Costs 20 us otherwise."""
        if self._resident() > self._least + self._slack:
            return_free_memory()
            self._least = self._resident()

    def _resident(self) -> int:
        """Bytes of this process that are in memory."""
        try:
            return int(_STATM.read_text().split()[1]) * mmap.PAGESIZE
        except OSError:  # no such thing on this system
            return 0
