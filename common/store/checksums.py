"""Checksums for every record and drive, fast enough to be computed for everything that is written.

A page is 512 words of 64 bits; its hash is the sum of the words, each times an odd constant of its place, modulo 2^64:
any change of a single word changes it, and exchanged words go unnoticed only by chance. The hash of a page is mixed
with the page's number and all are added up, so a record may be written in any pieces, in any order, by any number of
threads. Two different contents agree with a probability of about 2^-64: this finds damage, not forgery.
"""

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from common.store.errors import StoreError
from common.store.layout import ALIGNMENT, Extent, whole_pages

_WORDS = ALIGNMENT // 8


def mixed_words(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply SplitMix64's finalizer: every bit of the result depends on every bit of the value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed


GOLDEN_STEP = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's distance between states
_FACTORS = mixed_words((np.arange(_WORDS, dtype=np.uint64) + np.uint64(1)) * GOLDEN_STEP) | np.uint64(1)


def checksum(data: np.ndarray, first_page: int) -> int:
    """Return the checksum of bytes, uint8, whose first page has number ``first_page``. Parts add up modulo 2^64."""
    rest = data.nbytes % ALIGNMENT
    if rest:  # a record's last page is filled up with zeros
        padded = np.zeros(whole_pages(data.nbytes), np.uint8)
        padded[: data.nbytes] = data
        data = padded
    hashes = np.einsum("ij,j->i", data.view("<u8").reshape(-1, _WORDS), _FACTORS)
    numbers = np.arange(first_page, first_page + len(hashes), dtype=np.uint64)
    return int(mixed_words(hashes + mixed_words(numbers * GOLDEN_STEP)).sum())


class ExtentChecksums:
    """The checksums of one extent, one for each directory, computed and checked while its bytes are read or written."""

    def __init__(
        self, extent: Extent, directories: Sequence[Path], what: str, expected: Sequence[int] | None = None
    ) -> None:
        self._extent, self._directories, self._what = extent, directories, what
        self._expected = expected
        self._totals = [0] * len(directories)
        self._left = whole_pages(extent.nbytes)
        self._lock = threading.Lock()

    def add(self, directory: int, offset: int, data: np.ndarray) -> None:
        """Add bytes of the file in directory number ``directory``, from ``offset`` on; the last ones reveal damage."""
        value = checksum(data, (offset - self._extent.offset) // ALIGNMENT)
        with self._lock:
            self._totals[directory] = (self._totals[directory] + value) % (1 << 64)
            self._left -= whole_pages(data.nbytes)
            complete = not self._left
        if not complete or self._expected is None:
            return
        sums = zip(self._directories, self._totals, self._expected, strict=True)
        if damaged := [str(folder / self._extent.file) for folder, total, known in sums if total != known]:
            first = self._extent.offset
            last = first + self._extent.bytes_per_directory(len(self._directories)) - 1
            raise StoreError(
                f"{self._what} is damaged: bytes {first:,} to {last:,} of {' and '.join(damaged)} are not what was "
                "written there."
            )

    @property
    def values(self) -> tuple[int, ...]:
        """The checksum of each directory, once every byte has been added."""
        assert not self._left, f"{self._left} bytes of {self._what} have not been added"
        return tuple(self._totals)
