"""Memory and directories for the tests of the store."""

import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

Bytes = npt.NDArray[np.uint8]


def memory(nbytes: int, misaligned_by: int = 0) -> Bytes:
    """Zeroed memory whose address is ``misaligned_by`` bytes past a page boundary."""
    return np.frombuffer(mmap.mmap(-1, nbytes + misaligned_by), dtype=np.uint8)[misaligned_by:]


def noise(nbytes: int, seed: int = 0) -> Bytes:
    """Bytes in which every misplaced page would show."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.fixture
def make_directories(tmp_path: Path) -> Callable[[int], list[Path]]:
    def make(count: int) -> list[Path]:
        paths = [tmp_path / f"ssd{index}" for index in range(count)]
        for path in paths:
            path.mkdir()
        return paths

    return make
