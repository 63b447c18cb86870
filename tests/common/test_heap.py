"""What is free in the heap is given back when it is much."""

import ctypes
from pathlib import Path

import pytest

from common.heap import Heap

PIECE = 64 << 10


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_only_much_is_given_back() -> None:
    heap = Heap(slack=16 << 20)
    begun = resident()
    pieces = [bytearray(PIECE) for _ in range(640)]  # 40 MiB, below the size that gets a mapping of its own
    del pieces[::2]
    kept = resident()
    assert kept > begun + (30 << 20), "nothing goes back by itself from between what is in use"
    heap.tidy()
    assert resident() < kept - (10 << 20)
    few = resident()
    more = [bytearray(PIECE) for _ in range(64)]
    del more[::2]
    heap.tidy()
    assert resident() >= few, "a little stays"
