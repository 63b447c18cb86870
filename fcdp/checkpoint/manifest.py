"""The manifest of a commit: which rows of which tensor lie where, and their checksums.

Everything in this sealed JSON file is checked before it is used: a manifest that was edited leads to no other file and
to no absurd amount of memory."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.errors import FinetuneError, UserError
from common.models.checkpoint.shards import DTYPES
from common.store.manifest import read_sealed

MANIFEST = "commit.json"
FORMAT = 2
PIECE_BYTES = 16 << 20  # of the largest piece, unless a row is larger; a rank that needs a row reads its piece


@dataclass(frozen=True)
class TensorPiece:
    """Consecutive rows of one tensor, in one file."""

    file: str
    offset: int  # offset of the first row in the file
    start: int  # first row
    stop: int  # row after the last one
    sum: int  # checksum of its bytes by :func:`common.store.checksums.checksum`, from page 0


@dataclass(frozen=True)
class SavedTensor:
    """A whole tensor, in pieces that follow each other."""

    dtype: str  # dtype as safetensors writes it: ``F32``
    shape: tuple[int, ...]
    pieces: tuple[TensorPiece, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape[1:]) * DTYPES[self.dtype].itemsize

    def holding(self, start: int, stop: int) -> list[TensorPiece]:
        """Return the pieces with any of these rows."""
        return [piece for piece in self.pieces if piece.start < stop and piece.stop > start]


@dataclass(frozen=True)
class SavedFile:
    """A rank's safetensors file."""

    nbytes: int
    header_nbytes: int  # bytes of all that stands before the first tensor
    header_sum: int


@dataclass(frozen=True)
class Manifest:
    """All that a commit says about itself."""

    step: int
    description: dict[str, Any]  # JSON of the trainer: which model it is, and what goes with the state
    files: dict[str, SavedFile]
    tensors: dict[str, SavedTensor]

    def to_dict(self) -> dict[str, Any]:
        """Return the manifest for JSON."""
        return {
            "format": FORMAT,
            "step": self.step,
            "description": self.description,
            "files": {name: asdict(file) for name, file in self.files.items()},
            "tensors": {
                name: {
                    "dtype": saved.dtype,
                    "shape": saved.shape,
                    "pieces": [[each.file, each.offset, each.start, each.stop, each.sum] for each in saved.pieces],
                }
                for name, saved in self.tensors.items()
            },
        }

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "Manifest":
        """Read what :meth:`to_dict` has returned."""
        files = {name: SavedFile(**_whole_numbers(file)) for name, file in content["files"].items()}
        tensors = {
            name: SavedTensor(
                str(saved["dtype"]), tuple(saved["shape"]), tuple(TensorPiece(*piece) for piece in saved["pieces"])
            )
            for name, saved in content["tensors"].items()
        }
        manifest = cls(content["step"], dict(content["description"]), files, tensors)
        _check(manifest)
        return manifest

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read the manifest of the commit in ``folder``."""
        content = read_sealed(folder / MANIFEST)
        if content is None:
            raise FinetuneError(f"{folder} has lost its {MANIFEST}: it is no longer a commit.")
        if content.get("format") != FORMAT:
            raise UserError(
                f"{folder} is a commit in format {content.get('format')}. This version of the program reads format "
                f"{FORMAT}. Continue the run with the version that began it, or begin again with --overwrite."
            )
        try:
            return cls.from_dict(content)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise FinetuneError(f"{folder / MANIFEST} is not a valid commit ({error}): was it edited?") from error


def is_commit(folder: Path) -> bool:
    """Return whether ``folder`` was committed."""
    return (folder / MANIFEST).exists()


def _whole_numbers(content: dict[str, Any]) -> dict[str, int]:
    if not _are_whole(content.values()):
        raise ValueError(f"{content} has a value that is not a whole number")
    return content


def _are_whole(values: Iterable[Any]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def _check(manifest: Manifest) -> None:
    """Raise a ValueError unless all pieces lie in files of the folder, and every tensor is there once."""
    if not _are_whole([manifest.step]):
        raise ValueError(f"step {manifest.step}")
    for name, file in manifest.files.items():
        if Path(name).name != name or name in ("", ".", ".."):
            raise ValueError(f"{name!r} is not the name of a file in this folder")
        if file.header_nbytes > file.nbytes:
            raise ValueError(f"{name} has {file.nbytes} bytes and {file.header_nbytes} of header")
    for name, saved in manifest.tensors.items():
        if saved.dtype not in DTYPES or not saved.shape or not _are_whole(saved.shape):
            raise ValueError(f"{name} is {saved.dtype} {list(saved.shape)}")
        at = 0
        for piece in saved.pieces:
            if not _are_whole((piece.offset, piece.start, piece.stop, piece.sum)):
                raise ValueError(f"{name} has a piece {piece}")
            nbytes = (piece.stop - piece.start) * saved.row_bytes
            end = piece.offset + nbytes
            if nbytes > max(PIECE_BYTES, saved.row_bytes):
                raise ValueError(f"{name} has a piece of {nbytes} bytes")
            if piece.start != at or piece.stop <= at or end > manifest.files[piece.file].nbytes:
                raise ValueError(f"{name} has rows {piece.start} to {piece.stop} after row {at}, to byte {end}")
            at = piece.stop
        if at != saved.shape[0]:
            raise ValueError(f"{name} has {at} of {saved.shape[0]} rows")
