"""What is free in the heap is given back when it is much."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

#: In its own process: the heap of one that has run other tests has room for all of it.
PROGRAM = """
from pathlib import Path
from common.memory.meter import Heap

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

heap = Heap(slack=16 << 20)
seen = [resident()]
pieces = [bytearray(64 << 10) for _ in range(640)]  # 40 MiB, below the size that gets a separate mapping
del pieces[::2]
seen.append(resident())
heap.trim()
seen.append(resident())
more = [bytearray(64 << 10) for _ in range(64)]
del more[::2]
heap.trim()
print(*seen, resident())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_only_much_is_given_back() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True)
    begun, kept, tidied, few = map(int, done.stdout.split())
    assert kept > begun + (30 << 20), "nothing goes back automatically from between what is in use"
    assert tidied < kept - (10 << 20)
    assert few >= tidied, "a little stays"
