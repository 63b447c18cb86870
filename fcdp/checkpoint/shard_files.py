"""The files of a commit: a safetensors file from each rank, and the manifest with places and checksums of all rows.

The manifest has a checksum, too (:func:`common.store.manifest.read_sealed`): what it says is what was written."""

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from common.errors import FinetuneError, UserError
from common.models.checkpoint.shards import DTYPES
from common.store.checksums import checksum
from common.store.errors import StoreError, opened
from common.store.manifest import read_sealed
from fcdp.model.weights import row_range

MANIFEST = "commit.json"
FORMAT = 2
PIECE_BYTES = 16 << 20  # of the largest piece, unless a row is larger; a rank that needs a row reads its piece
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorPiece(NamedTuple):
    """Consecutive rows of one tensor, in one file."""

    file: str
    offset: int  # offset of the first row in the file
    start: int  # first row
    stop: int  # row after the last one
    sum: int  # checksum of its bytes by :func:`common.store.checksums.checksum`, from page 0


class SavedFile(NamedTuple):
    """A rank's safetensors file."""

    nbytes: int
    header_nbytes: int  # bytes of all that stands before the first tensor
    header_sum: int


@dataclass(frozen=True)
class SavedTensor:
    """A whole tensor, in pieces that follow each other."""

    dtype: str  # dtype as safetensors writes it: ``F32``
    shape: tuple[int, ...]
    pieces: tuple[TensorPiece, ...]

    def nbytes(self, piece: TensorPiece | None = None) -> int:
        """Return the bytes of a piece, or of one row."""
        rows = 1 if piece is None else piece.stop - piece.start
        return rows * math.prod(self.shape[1:]) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Manifest:
    """All that the commit in ``folder`` says about itself."""

    folder: Path
    step: int
    description: dict[str, Any]  # JSON of the trainer: which model it is, and what goes with the state
    files: dict[str, SavedFile]
    tensors: dict[str, SavedTensor]

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "step": self.step,
            "description": self.description,
            "files": {name: file._asdict() for name, file in self.files.items()},
            "tensors": {name: vars(saved) for name, saved in self.tensors.items()},
        }

    @classmethod
    def from_dict(cls, folder: Path, content: dict[str, Any]) -> "Manifest":
        """Return the manifest that :meth:`to_dict` described."""
        files = {name: SavedFile(**file) for name, file in content["files"].items()}
        tensors = {
            name: SavedTensor(saved["dtype"], tuple(saved["shape"]), tuple(TensorPiece(*p) for p in saved["pieces"]))
            for name, saved in content["tensors"].items()
        }
        return cls(folder, content["step"], content["description"], files, tensors)

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
        return cls.from_dict(folder, content)

    def read_rows(self, name: str, value: DTensor) -> None:
        """Fill this rank's rows of ``value`` with those saved as tensor ``name``, and compare their checksums."""
        saved, (first, last) = self.tensors[name], row_range(value)
        for piece in saved.pieces:
            start, stop = max(first, piece.start), min(last, piece.stop)
            if start < stop:
                data = torch.from_numpy(self._read_piece(name, piece)).view(DTYPES[saved.dtype])
                rows = data.view(-1, *saved.shape[1:])[start - piece.start : stop - piece.start]
                with torch.no_grad():
                    value.to_local()[start - first : stop - first].copy_(rows)

    def verify(self) -> Iterator[tuple[int, str | None]]:
        """Read everything. Yield the bytes of each file header and piece, and a sentence if it is damaged."""
        pieces = sorted((piece, name) for name, saved in self.tensors.items() for piece in saved.pieces)
        for file, of_file in itertools.groupby(pieces, key=lambda item: item[0].file):
            _, nbytes, header_sum = self.files[file]
            try:
                self._read(file, f"{file} is damaged: its header", 0, nbytes, header_sum)
            except StoreError as error:
                yield nbytes, str(error)
                continue
            yield nbytes, None
            for piece, name in of_file:
                try:
                    yield len(self._read_piece(name, piece)), None
                except StoreError as error:
                    yield self.tensors[name].nbytes(piece), str(error)

    def _read_piece(self, name: str, piece: TensorPiece) -> np.ndarray:
        rows = f"its rows {piece.start:,} to {piece.stop - 1:,}"
        nbytes = self.tensors[name].nbytes(piece)
        return self._read(piece.file, f"{name} is damaged: {rows}", piece.offset, nbytes, piece.sum)

    def _read(self, file: str, what: str, offset: int, nbytes: int, expected_sum: int) -> np.ndarray:
        """Return bytes of a file, which have this checksum."""
        path, expected, data, done = self.folder / file, self.files[file].nbytes, np.zeros(nbytes, np.uint8), 0
        with opened(path, "reading", os.O_RDONLY) as descriptor:
            size = os.fstat(descriptor).st_size
            if size != expected:
                raise StoreError(f"{path} has {size:,} bytes instead of {expected:,}.")
            while done < nbytes and (count := os.preadv(descriptor, [data[done:].data], offset + done)):
                done += count
        if checksum(data, 0) != expected_sum:
            raise StoreError(
                f"{what}, bytes {offset:,} to {offset + nbytes - 1:,} of {path}, are not what was written there."
            )
        return data


def write_shards(path: Path, shards: Mapping[str, DTensor]) -> tuple[SavedFile, dict[str, list[TensorPiece]]]:
    """Write this rank's rows of tensors to a new file, which is synced; its folder is not."""
    header = _header({name: value.to_local() for name, value in shards.items()})
    pieces: dict[str, list[TensorPiece]] = {name: [] for name in shards}
    with opened(path, "writing", os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
        _write(descriptor, header)
        offset = len(header)
        for name, value in shards.items():
            local, first = value.to_local().detach(), row_range(value)[0]
            step = max(1, PIECE_BYTES * len(local) // max(1, local.nbytes))
            for start in range(0, len(local), step):
                rows = local[start : start + step]
                data = rows.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                _write(descriptor, data)
                at = first + start
                pieces[name].append(TensorPiece(path.name, offset, at, at + len(rows), checksum(data, 0)))
                offset += data.nbytes
        os.fsync(descriptor)
    return SavedFile(offset, len(header), checksum(header, 0)), pieces


def _header(tensors: Mapping[str, torch.Tensor]) -> np.ndarray:
    """Return the start of a safetensors file, its length a multiple of 8 as the format requires."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, data in tensors.items():
        span = [offset, offset + data.nbytes]
        entries[name] = {"dtype": DTYPE_NAMES[data.dtype], "shape": list(data.shape), "data_offsets": span}
        offset += data.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)


def _write(descriptor: int, data: np.ndarray) -> None:
    rest = data.data
    while rest:
        rest = rest[os.write(descriptor, rest) :]
