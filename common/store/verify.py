"""Verify a store: read records again, and compare them with the checksums of what was written."""

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import astuple, dataclass
from typing import Any

from common.store.backends.posix import aligned_bytes
from common.store.checksums import ExtentChecksums
from common.store.errors import StoreError
from common.store.layout import Extent
from common.store.store import Store

PIECE_BYTES = 16 << 20  # Bytes of one read
PIECES = 4  # Number of concurrent reads, so that this takes 64 MiB of memory


@dataclass(frozen=True)
class ChecksummedExtent:
    """An extent, and the checksums of what was written to it."""

    what: str  # Name of its content, for messages: `block 7, optimizer states`
    extent: Extent
    sums: tuple[int, ...]  # Checksum of each directory

    def to_dict(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "extent": list(astuple(self.extent)),
            "sums": [f"{value:016x}" for value in self.sums],
        }

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "ChecksummedExtent":
        """Return what :meth:`to_dict` described.

        Raises:
            TypeError, ValueError, KeyError: if it describes something else.
        """
        file, offset, nbytes, unit = content["extent"]
        sums = tuple(int(text, 16) for text in content["sums"])
        return cls(str(content["what"]), Extent(str(file), int(offset), int(nbytes), int(unit)), sums)


def verify(store: Store, sealed: Iterable[ChecksummedExtent]) -> tuple[int, list[str]]:
    """Read all of ``sealed``; return the bytes read, and a sentence for each that is damaged or cannot be read."""
    read, damage = 0, []
    for entry in sealed:
        read += entry.extent.nbytes
        try:
            read_all(store, entry.extent, ExtentChecksums(entry.extent, store.directories, entry.what, entry.sums))
        except StoreError as error:
            damage.append(str(error))
    return read, damage


def read_all(store: Store, extent: Extent, sums: ExtentChecksums) -> None:
    """Read all of ``extent`` and add it to ``sums``.

    Raises:
        StoreError: if a drive fails, or ``sums`` finds damage.
    """
    free = [aligned_bytes(min(PIECE_BYTES, extent.nbytes)) for _ in range(PIECES)]
    under_way: deque[tuple[Future[None], Any]] = deque()
    try:
        for start in range(0, extent.nbytes, PIECE_BYTES):
            if not free:
                future, buffer = under_way.popleft()
                future.result()
                free.append(buffer)
            buffer = free.pop()
            length = min(PIECE_BYTES, extent.nbytes - start)
            under_way.append((store.read(extent, buffer, start, length, sums), buffer))
        for future, _ in under_way:
            future.result()
    finally:
        for future, _ in under_way:  # nothing may write into a buffer that is freed
            future.exception()
