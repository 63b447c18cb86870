"""The places of all records: in files of whole pages, striped over all directories.

A *file* here is a logical one: every directory holds a file of that name, all equally long, and an extent takes the
same byte range in each of them.
"""

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

ALIGNMENT = 4096  # Bytes of a page: direct I/O needs address, offset and length in whole pages

# Bytes of the largest single I/O call. Larger ones gain nothing; smaller ones cost more calls.
LARGEST_UNIT = 4 << 20

LARGEST_FILE = 1 << 60  # Bytes above which a stated size is taken for damage


def whole_pages(nbytes: int) -> int:
    """Round ``nbytes`` up to a multiple of ``ALIGNMENT``."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Extent:
    """A striped byte range."""

    file: str  # Name of the logical file that holds it, such as `weights.0`
    offset: int  # Start inside that file in every directory, in bytes; a multiple of `ALIGNMENT`
    nbytes: int  # Logical length in bytes; any positive number
    unit: int  # Bytes of one stripe: a multiple of `ALIGNMENT`, at most `LARGEST_UNIT`

    def bytes_per_directory(self, directories: int) -> int:
        """Return the bytes that it takes in each directory (in the fullest one, to be exact)."""
        full_rows = (self.nbytes - 1) // (self.unit * directories)
        last_row = self.nbytes - full_rows * self.unit * directories
        return full_rows * self.unit + min(self.unit, whole_pages(last_row))


class TransferPiece(NamedTuple):
    """The part of a transfer that one I/O call moves."""

    directory: int
    offset: int  # Start in the file of that directory, in bytes
    start: int  # Start in the caller's buffer, in bytes
    nbytes: int


def pieces(extent: Extent, directories: int, offset: int, nbytes: int) -> Iterator[TransferPiece]:
    """Yield the I/O calls for bytes ``[offset, offset + nbytes)`` of ``extent``, in the order of those bytes.

    Stripe k lies in directory k % ``directories``, at ``extent.offset + (k // directories) * extent.unit``.
    """
    position = offset
    end = offset + nbytes
    while position < end:
        stripe, skip = divmod(position, extent.unit)
        row, directory = divmod(stripe, directories)
        length = min(extent.unit - skip, end - position)
        yield TransferPiece(directory, extent.offset + row * extent.unit + skip, position - offset, length)
        position += length


class Layout:
    """All extents of a store, in the order in which they were allocated: equal calls give equal layouts."""

    def __init__(self, directories: int) -> None:
        if directories < 1:
            raise ValueError(f"a layout needs at least one directory, not {directories}")
        self.directories = directories
        self._extents: dict[str, list[Extent]] = {}
        self._file_bytes: dict[str, int] = {}

    def allocate(self, file: str, nbytes: int) -> Extent:
        """Allocate the next ``nbytes`` bytes of ``file``, as evenly over the directories as whole pages allow."""
        if nbytes < 1:
            raise ValueError(f"an extent holds at least one byte, not {nbytes}")
        # As many rows of stripes as the largest unit asks for, all equally long: with units of exactly 4 MiB a record
        # of 13 MiB on three drives would keep the first one busy for 5 MiB and the last one for 4.
        rows = -(-nbytes // (LARGEST_UNIT * self.directories))
        unit = whole_pages(-(-nbytes // (rows * self.directories)))
        extent = Extent(file, self._file_bytes.get(file, 0), nbytes, unit)
        self._append(extent)
        return extent

    def _append(self, extent: Extent) -> None:
        name = extent.file
        if not name or name in (".", "..") or "/" in name or "\0" in name or name.endswith((".json", ".tmp")):
            raise ValueError(
                f"{name!r} cannot be a file of a store: take a plain name that is not .json or .tmp"
            )
        self._extents.setdefault(name, []).append(extent)
        self._file_bytes[name] = extent.offset + extent.bytes_per_directory(self.directories)

    def extents(self, file: str) -> list[Extent]:
        """Return the extents of ``file``, in the order in which they were allocated."""
        return list(self._extents.get(file, ()))

    def file_bytes(self) -> dict[str, int]:
        """Return the bytes that each file takes in *each* directory."""
        return dict(self._file_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Return the layout for JSON: ``{"directories": n, "files": {name: [[offset, nbytes, unit], ...]}}``."""
        files = {name: [astuple(extent)[1:] for extent in extents] for name, extents in self._extents.items()}
        return {"directories": self.directories, "files": files}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "Layout":
        """Return the layout that ``to_dict`` described; any other content is an error."""
        layout = cls(content["directories"])
        for name, extents in content["files"].items():
            for offset, nbytes, unit in extents:
                if not all(type(number) is int for number in (offset, nbytes, unit)):
                    raise TypeError(f"an extent of {name} at {offset!r} of {nbytes!r} bytes by {unit!r}")
                sensible = offset == layout._file_bytes.get(name, 0) and 0 < nbytes < LARGEST_FILE
                if not sensible or unit % ALIGNMENT or not 0 < unit <= LARGEST_UNIT:
                    raise ValueError(f"an extent of {name} at {offset} of {nbytes} bytes by {unit}")
                layout._append(Extent(name, offset, nbytes, unit))
        return layout

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]  # it changes with every allocation
