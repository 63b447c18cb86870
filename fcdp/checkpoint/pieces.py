"""Writing and reading rows of tensors in a rank's file, an ordinary safetensors file that any tool can read."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from common.models.checkpoint.shards import DTYPES
from common.store.checksums import checksum
from common.store.errors import StoreError, opened
from fcdp.checkpoint.manifest import PIECE_BYTES, Manifest, SavedFile, SavedTensor, TensorPiece

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of a tensor that this rank holds."""

    first: int  # row of the whole tensor that is the first of ``data``
    data: torch.Tensor  # the rows, ``[rows, ...]``


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of ``dtype`` in safetensors files."""
    return _NAMES[dtype]


def write_rows(path: Path, named: Mapping[str, Rows]) -> tuple[SavedFile, dict[str, list[TensorPiece]]]:
    """Write rows, by name of their tensor, to a new file, which is synced; its folder is not."""
    header = _header(named)
    pieces: dict[str, list[TensorPiece]] = {}
    with opened(path, "writing", os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
        _write(descriptor, np.frombuffer(header, np.uint8))
        at = len(header)
        for name, rows in named.items():
            pieces[name] = []
            for start, stop in _cut(rows.data):
                data = _bytes_of(rows.data[start:stop])
                _write(descriptor, data)
                place = TensorPiece(path.name, at, rows.first + start, rows.first + stop, checksum(data, 0))
                pieces[name].append(place)
                at += data.nbytes
        os.fsync(descriptor)
    return SavedFile(at, len(header), checksum(np.frombuffer(header, np.uint8), 0)), pieces


class Reader:
    """Reads the pieces of the commit in ``folder``, and compares each with its checksum."""

    def __init__(self, folder: Path, manifest: Manifest):
        self._folder, self._manifest = folder, manifest
        self._seen: set[str] = set()

    def read(self, name: str, rows: Rows) -> None:
        """Fill ``rows`` with the saved rows of tensor ``name``."""
        saved = self._manifest.tensors[name]
        start, stop = rows.first, rows.first + len(rows.data)
        for piece in saved.holding(start, stop):
            with self._open(piece.file) as descriptor:
                data = self._read_piece(descriptor, name, saved, piece)
            values = torch.from_numpy(data).view(DTYPES[saved.dtype]).reshape(-1, *saved.shape[1:])
            first, last = max(start, piece.start), min(stop, piece.stop)
            with torch.no_grad():
                rows.data[first - start : last - start].copy_(values[first - piece.start : last - piece.start])

    def check_all(self) -> Iterator[tuple[int, str | None]]:
        """Read everything. Yield the bytes of each piece and file header, and a sentence if it is damaged."""
        by_file: dict[str, list[tuple[str, SavedTensor, TensorPiece]]] = {name: [] for name in self._manifest.files}
        for name, saved in self._manifest.tensors.items():
            for piece in saved.pieces:
                by_file[piece.file].append((name, saved, piece))
        for file, found in by_file.items():
            header = self._manifest.files[file].header_nbytes
            try:
                with self._open(file) as descriptor:
                    yield header, None
                    for name, saved, piece in sorted(found, key=lambda each: each[2].offset):
                        nbytes = (piece.stop - piece.start) * saved.row_bytes
                        try:
                            self._read_piece(descriptor, name, saved, piece)
                        except StoreError as error:
                            yield nbytes, str(error)
                        else:
                            yield nbytes, None
            except StoreError as error:
                yield header, str(error)

    @contextmanager
    def _open(self, name: str) -> Iterator[int]:
        """Open a file, and check its size and header."""
        path, expected = self._folder / name, self._manifest.files[name]
        with opened(path, "reading", os.O_RDONLY) as descriptor:
            size = os.fstat(descriptor).st_size
            if size != expected.nbytes:
                raise StoreError(f"{path} has {size:,} bytes instead of {expected.nbytes:,}.")
            if name not in self._seen:
                header = _read(descriptor, path, 0, expected.header_nbytes)
                if checksum(header, 0) != expected.header_sum:
                    raise StoreError(
                        f"{path} is damaged: its header, the first {len(header):,} bytes, is not what was written."
                    )
                self._seen.add(name)
            yield descriptor

    def _read_piece(self, descriptor: int, name: str, saved: SavedTensor, piece: TensorPiece) -> np.ndarray:
        path = self._folder / piece.file
        nbytes = (piece.stop - piece.start) * saved.row_bytes
        data = _read(descriptor, path, piece.offset, nbytes)
        if checksum(data, 0) != piece.sum:
            raise StoreError(
                f"{name} is damaged: its rows {piece.start:,} to {piece.stop - 1:,}, bytes {piece.offset:,} to "
                f"{piece.offset + nbytes - 1:,} of {path}, are not what was written there."
            )
        return data


def _header(named: Mapping[str, Rows]) -> bytes:
    """Return the start of a safetensors file, its length a multiple of 8 as the format asks for."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, rows in named.items():
        entries[name] = {
            "dtype": dtype_name(rows.data.dtype),
            "shape": list(rows.data.shape),
            "data_offsets": [at, at + rows.data.nbytes],
        }
        at += rows.data.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _cut(data: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows with at most :data:`PIECE_BYTES` each."""
    rows = len(data)
    step = max(1, PIECE_BYTES * rows // max(1, data.nbytes))
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def _bytes_of(data: torch.Tensor) -> np.ndarray:
    flat: np.ndarray = data.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat


def _write(descriptor: int, data: np.ndarray) -> None:
    rest = data.data
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _read(descriptor: int, path: Path, offset: int, nbytes: int) -> np.ndarray:
    data = np.empty(nbytes, np.uint8)
    done = 0
    while done < nbytes:
        count = os.preadv(descriptor, [data[done:].data], offset + done)
        if not count:
            raise StoreError(f"{path} ends at byte {offset + done:,}, and {nbytes - done:,} more were written there.")
        done += count
    return data
