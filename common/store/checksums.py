"""Checksums for every record and drive, fast enough to be computed for everything that is written.

A page is 512 words of 64 bits; its hash is the sum of the words, each times an odd constant of its place, modulo 2^64:
any change of a single word changes it, and exchanged words go unnoticed only by chance. The hash of a page is mixed
with the page's number and all are added up, so a record may be written in any pieces, in any order, by any number of
threads. Two different contents agree with a probability of about 2^-64: this finds damage, not forgery.
"""

import bisect
import threading
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from common.store.errors import StoreError
from common.store.layout import ALIGNMENT, Extent

if TYPE_CHECKING:
    import torch

_WORDS = ALIGNMENT // 8


def mixed_words(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply SplitMix64's finalizer: every bit of the result depends on every bit of the value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed


GOLDEN_STEP = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's distance between states
_FACTORS = mixed_words((np.arange(_WORDS, dtype=np.uint64) + np.uint64(1)) * GOLDEN_STEP) | np.uint64(1)


def checksum(data: "np.ndarray | torch.Tensor", first_page: int) -> int:
    """Return the checksum of bytes, uint8, whose first page has number ``first_page``. Parts add up modulo 2^64.

    A device computes the hashes of the pages in its memory, and sends only these.
    """
    body = data.nbytes - data.nbytes % ALIGNMENT
    if isinstance(data, np.ndarray):
        hashes = _host_hashes(data[:body])
        rest = data[body:]
    else:
        hashes = _device_hashes(data[:body])
        rest = data[body:].cpu().numpy()
    if len(rest):  # a record's last page is filled up with zeros
        padded = np.zeros(ALIGNMENT, np.uint8)
        padded[: len(rest)] = rest
        hashes = np.concatenate([hashes, _host_hashes(padded)])
    numbers = np.arange(first_page, first_page + len(hashes), dtype=np.uint64)
    return int(mixed_words(hashes + mixed_words(numbers * GOLDEN_STEP)).sum())


def checksum_of_zeros(first_page: int, nbytes: int) -> int:
    """Return the checksum of ``nbytes`` zeros, whose first page has number ``first_page``."""
    numbers = np.arange(first_page, first_page + -(-nbytes // ALIGNMENT), dtype=np.uint64)
    return int(mixed_words(mixed_words(numbers * GOLDEN_STEP)).sum())  # the hash of a page of zeros is 0


def _host_hashes(pages: np.ndarray) -> npt.NDArray[np.uint64]:
    return np.einsum("ij,j->i", pages.view("<u8").reshape(-1, _WORDS), _FACTORS)


def _device_hashes(pages: "torch.Tensor") -> npt.NDArray[np.uint64]:
    import torch

    factors = torch.from_numpy(_FACTORS.view(np.int64)).to(pages.device)
    hashes = []
    for some in pages.view(torch.int64).view(-1, _WORDS).split(_DEVICE_PAGES):
        hashes.append((some * factors).sum(1).cpu())  # modulo 2^64, as without a sign
    return torch.cat(hashes).numpy().view(np.uint64) if hashes else np.zeros(0, np.uint64)


# Pages whose words are multiplied at once: they take as many bytes again of the device's memory
_DEVICE_PAGES = 256


# `[parts, directories]`: the checksum of each part of an extent in each directory
PartSums = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class ChecksummedExtent:
    """An extent, and the checksums of what was written to it, as a manifest lists them."""

    what: str  # Name of its content, for messages: `block 7, optimizer states`
    extent: Extent
    sums: PartSums

    def to_dict(self) -> dict[str, Any]:
        sums = [of_directory.astype(">u8").tobytes().hex() for of_directory in self.sums.T]
        return {"what": self.what, "extent": list(astuple(self.extent)), "sums": sums}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "ChecksummedExtent":
        file, offset, nbytes, unit = content["extent"]
        columns = [np.frombuffer(bytes.fromhex(text), ">u8") for text in content["sums"]]
        sums = np.stack(columns, axis=1).astype(np.uint64)
        return cls(str(content["what"]), Extent(str(file), int(offset), int(nbytes), int(unit)), sums)


class DamagedError(StoreError):
    """Bytes on drives are not what was written there."""

    def __init__(self, message: str, directories: Sequence[Path]):
        super().__init__(message)
        self.directories = tuple(directories)  # Directories whose bytes differ


@dataclass(frozen=True)
class CheckedExtent:
    """An extent with what it must hold: a checksum for each of its parts, so that a part can be read alone."""

    what: str  # Name of its content, for messages
    extent: Extent
    ends: Sequence[int]  # End of each part, in bytes of the extent: whole pages, but for the last part
    sums: PartSums

    def covering(self, offset: int, nbytes: int) -> tuple[int, int]:
        """Return the first byte, and the end, of the fewest whole parts that hold a range."""
        first = bisect.bisect_right(self.ends, offset)
        last = bisect.bisect_left(self.ends, offset + nbytes)
        return self.ends[first - 1] if first else 0, self.ends[last]


_ADVICE = (
    " They were not used, and nothing after them is committed. Look at the drive's health (smartctl, dmesg); finetune "
    "verify reads everything. If it is whole, --resume continues from the last committed step; if not, and no backup "
    "of all directories can be restored, begin again with --overwrite, from a checkpoint of this run (--model) if it "
    "has saved any."
)


class ExtentChecksums:
    """The checksums of one extent, for each part and directory, added up while its bytes are read or written.

    Args:
        ends: end of each part, in bytes of the extent; None: it is a single part.
        expected: what the parts that are read must have.
    """

    def __init__(
        self,
        extent: Extent,
        directories: Sequence[Path],
        what: str,
        ends: Sequence[int] | None = None,
        expected: PartSums | None = None,
    ) -> None:
        self._extent = extent
        self._directories = directories
        self._what = what
        self._ends = [extent.nbytes] if ends is None else ends
        self._expected = expected
        self._totals = [[0] * len(directories) for _ in self._ends]
        starts = [0, *self._ends[:-1]]
        self._left = [end - start for start, end in zip(starts, self._ends, strict=True)]
        self._lock = threading.Lock()

    def add(self, directory: int, offset: int, start: int, data: "np.ndarray | torch.Tensor") -> None:
        """Add bytes, uint8, that are in directory number ``directory``; the last ones of a part reveal damage.

        Args:
            offset: of the first in the file.
            start: of the first in the extent.
        """
        self._add(
            directory,
            offset,
            start,
            len(data),
            lambda done, nbytes, page: checksum(data[done:][:nbytes], page),
        )

    def add_zeros(self, directory: int, offset: int, start: int, nbytes: int) -> None:
        """Add bytes as :meth:`add` does, which are zeros."""
        self._add(
            directory, offset, start, nbytes, lambda done, nbytes, page: checksum_of_zeros(page, nbytes)
        )

    def _add(
        self, directory: int, offset: int, start: int, count: int, checksum_of: Callable[[int, int, int], int]
    ) -> None:
        page = (offset - self._extent.offset) // ALIGNMENT
        part = bisect.bisect_right(self._ends, start)
        done = 0
        while done < count:
            nbytes = min(self._ends[part] - start - done, count - done)
            value = checksum_of(done, nbytes, page + done // ALIGNMENT)
            with self._lock:
                totals = self._totals[part]
                totals[directory] = (totals[directory] + value) % (1 << 64)
                self._left[part] -= nbytes
                complete = not self._left[part]
            if complete and self._expected is not None:
                self._compare(totals, self._expected[part].tolist(), _ADVICE)
            part = part + 1
            done = done + nbytes

    def compare(self, expected: PartSums) -> None:
        """Compare the whole extent, of which every byte has been added, with the sum of the checksums of its parts.

        Raises:
            DamagedError: it is damaged; names the extent's content and the files.
        """
        self._compare(self.parts().sum(axis=0).tolist(), expected.sum(axis=0).tolist())

    def _compare(self, totals: Sequence[int], expected: Sequence[int], advice: str = "") -> None:
        sums = zip(self._directories, totals, expected, strict=True)
        if damaged := [directory for directory, total, right in sums if total != right]:
            files = " and ".join(str(directory / self._extent.file) for directory in damaged)
            first = self._extent.offset
            last = first + self._extent.bytes_per_directory(len(self._directories)) - 1
            raise DamagedError(
                f"{self._what} is damaged: bytes {first:,} to {last:,} of {files} are not what was written there."
                f"{advice}",
                damaged,
            )

    def parts(self) -> PartSums:
        """Return the checksums of all parts, once every byte has been added."""
        assert not any(self._left), f"{sum(self._left)} bytes of {self._what} have not been added"
        return np.array(self._totals, np.uint64)

    def checked(self) -> CheckedExtent:
        """Return the extent as it can be read, once every byte has been added."""
        return CheckedExtent(self._what, self._extent, self._ends, self.parts())
