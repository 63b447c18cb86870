"""Commits: whole states of a run on a file system that all nodes share, written by all ranks together.

A commit is a folder ``step-<N>``: a safetensors file from each rank with the rows that it holds, and a manifest with
places and checksums, so that any number of ranks can load it. It is written under another name, renamed once all of it
is on the drives, and only then the last one is removed: the newest commit is always whole."""

import contextlib
import re
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from common.communication import broadcast_from_rank0, run_on_all_ranks
from common.errors import FinetuneError, UserError
from common.store import DirectoryLock
from common.store.errors import described
from common.store.manifest import sync_directory, write_sealed
from fcdp.checkpoint.manifest import MANIFEST, Manifest, SavedFile, SavedTensor, TensorPiece, is_commit
from fcdp.checkpoint.pieces import Reader, Rows, dtype_name, write_rows
from fcdp.model.weights import row_range

_INCOMPLETE, _DISCARDED = "incomplete", "discarded"


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """The result of reading a whole commit."""

    step: int
    parts: int  # number of parts of tensors and files, each with a checksum
    nbytes: int  # bytes that were read
    damage: list[str]  # sentences, one for each part that is not what was written; names tensor and file


class ShardedCheckpoints:
    """The commits of one run, in a directory that is the same on all nodes."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._lock: DirectoryLock | None = None

    def newest(self) -> int | None:
        """Return the step of the newest commit; None if there is none."""
        return max(self._steps(), default=None)

    def describe(self, step: int) -> dict[str, Any]:
        """Return the description that the commit of ``step`` was saved with."""
        return Manifest.read(self._folder(step)).description

    def lock(self) -> None:
        """Keep other runs out until :meth:`close`, and remove what a killed run left half done. On one rank."""
        _make(self.directory)
        self._lock = DirectoryLock([self.directory])
        for name in (_INCOMPLETE, _DISCARDED):
            _empty(self.directory / name)
        for step in sorted(self._steps())[:-1]:
            self._remove(self._folder(step))

    def save(self, step: int, state: Mapping[str, torch.Tensor], description: dict[str, Any]) -> None:
        """Commit ``state`` (DTensors sharded by rows) to the drives, and drop older commits. Collective."""
        incomplete = self.directory / _INCOMPLETE
        broadcast_from_rank0(lambda: self._prepare(incomplete))
        written = run_on_all_ranks(lambda: _write_own(incomplete, state))
        broadcast_from_rank0(lambda: self._finish(incomplete, _assemble(step, state, description, written)))

    def load(self, manifest: Manifest, state: Mapping[str, torch.Tensor]) -> None:
        """Read a commit into the tensors of ``state``, however they are sharded. Collective."""
        run_on_all_ranks(lambda: self._load_own(manifest, state))

    def read_newest(self) -> Manifest | None:
        """Return the manifest of the newest commit, as rank 0 sees it. Collective."""
        content = broadcast_from_rank0(self._read_newest)
        return None if content is None else Manifest.from_dict(content)

    def discard(self) -> None:
        """Remove all commits. For one rank to call."""
        for step in self._steps():
            self._remove(self._folder(step))

    def verify(self) -> VerifiedCheckpoint:
        """Read all of the newest commit and compare it with its checksums. No run may be at work."""
        with DirectoryLock([self.directory], patience=0):
            step = self.newest()
            if step is None:
                raise UserError(f"The run in {self.directory} ended before its first commit.")
            manifest = Manifest.read(self._folder(step))
            nbytes, parts, damage = 0, 0, []
            for read, sentence in Reader(self._folder(step), manifest).check_all():
                nbytes, parts = nbytes + read, parts + 1
                if sentence is not None:
                    damage.append(sentence)
        return VerifiedCheckpoint(step, parts, nbytes, damage)

    def close(self) -> None:
        """Let other runs use the commits."""
        if self._lock is not None:
            self._lock.close()

    def _steps(self) -> list[int]:
        named = {path: re.fullmatch(r"step-(\d+)", path.name) for path in self.directory.glob("step-*")}
        return [int(match[1]) for path, match in named.items() if match and is_commit(path)]

    def _folder(self, step: int) -> Path:
        return self.directory / f"step-{step}"

    def _read_newest(self) -> dict[str, Any] | None:
        step = self.newest()
        return None if step is None else Manifest.read(self._folder(step)).to_dict()

    def _prepare(self, incomplete: Path) -> None:
        _make(self.directory)
        _empty(incomplete)
        _make(incomplete)

    def _finish(self, incomplete: Path, manifest: Manifest) -> None:
        write_sealed(incomplete / MANIFEST, manifest.to_dict())  # syncs the folder, and with it the names of all files
        older = self._steps()
        folder = self._folder(manifest.step)
        with described("renaming", incomplete):
            incomplete.rename(folder)
        sync_directory(self.directory)
        for step in older:
            self._remove(self._folder(step))

    def _remove(self, folder: Path) -> None:
        """Remove a commit, which is renamed, and no commit any more, before any of it is deleted."""
        away = self.directory / _DISCARDED
        _empty(away)
        with described("renaming", folder):
            folder.rename(away)
        sync_directory(self.directory)
        _empty(away)

    def _load_own(self, manifest: Manifest, state: Mapping[str, torch.Tensor]) -> None:
        folder = self._folder(manifest.step)
        if unmatched := sorted(manifest.tensors.keys() ^ state.keys()):
            raise FinetuneError(f"{folder} belongs to another model: {unmatched[0]} is in only one of them.")
        reader = Reader(folder, manifest)
        for name, value in state.items():
            saved, wanted = manifest.tensors[name], (dtype_name(value.dtype), tuple(value.shape))
            if (saved.dtype, saved.shape) != wanted:
                raise FinetuneError(
                    f"{folder} belongs to another model: {name} is {saved.dtype} {list(saved.shape)} there, and "
                    f"{wanted[0]} {list(wanted[1])} in this one."
                )
            reader.read(name, _own_rows(value))


def _own_rows(value: torch.Tensor) -> Rows:
    assert isinstance(value, DTensor)
    return Rows(row_range(value)[0], value.to_local())


def _write_own(folder: Path, state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Write the rows that are this rank's to write. Ranks that hold the same rows take turns, tensor by tensor."""
    mine = {}
    for index, (name, value) in enumerate(state.items()):
        assert isinstance(value, DTensor)
        rows, shards = _own_rows(value), value.device_mesh.size(value.device_mesh.ndim - 1)
        copy, copies = dist.get_rank() // shards, dist.get_world_size() // shards  # shards are on consecutive ranks
        if index % copies == copy and len(rows.data):
            mine[name] = rows
    if not mine:
        return {"files": {}, "pieces": {}}
    path = folder / f"rank-{dist.get_rank():05d}.safetensors"
    file, pieces = write_rows(path, mine)
    return {
        "files": {path.name: asdict(file)},
        "pieces": {name: [astuple(piece) for piece in found] for name, found in pieces.items()},
    }


def _assemble(
    step: int, state: Mapping[str, torch.Tensor], description: dict[str, Any], written: list[dict[str, Any]]
) -> Manifest:
    """Return the manifest of a commit from what every rank has written."""
    pieces: dict[str, list[TensorPiece]] = {name: [] for name in state}
    files = {name: SavedFile(**file) for one in written for name, file in one["files"].items()}
    for one in written:
        for name, found in one["pieces"].items():
            pieces[name] += [TensorPiece(*piece) for piece in found]
    tensors = {
        name: SavedTensor(
            dtype_name(value.dtype), tuple(value.shape), tuple(sorted(pieces[name], key=lambda piece: piece.start))
        )
        for name, value in state.items()
    }
    return Manifest(step, description, files, tensors)


def _make(directory: Path) -> None:
    """Make a directory and its parents, durably: a power cut does not take them away with what is in them."""
    if directory.is_dir():
        return
    _make(directory.parent)
    with described("making", directory):
        directory.mkdir()
    sync_directory(directory.parent)


def _empty(folder: Path) -> None:
    """Remove a folder of files, if it is there."""
    with described("removing", folder), contextlib.suppress(FileNotFoundError):
        for file in list(folder.iterdir()):
            file.unlink()
        folder.rmdir()
