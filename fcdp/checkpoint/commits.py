"""Commits: whole states of a run on a file system that all nodes share, written by all ranks together.

A commit is a folder ``step-<N>`` that any number of ranks can load. It is written under another name, renamed once all
of it is on the drives, and only then the last one is removed: the newest commit is always whole."""

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from common.communication import broadcast_from_rank0, run_on_all_ranks
from common.errors import FinetuneError, UserError
from common.store import DirectoryLock
from common.store.errors import described
from common.store.manifest import sync_directory, write_sealed
from fcdp.checkpoint.shard_files import (
    DTYPE_NAMES,
    MANIFEST,
    Manifest,
    SavedFile,
    SavedTensor,
    TensorPiece,
    write_shards,
)

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
        return max(self._steps(), default=None)

    def describe(self, step: int) -> dict[str, Any]:
        return Manifest.read(self._folder(step)).description

    def lock(self) -> None:
        """Keep other runs out until :meth:`close`, and remove what a killed run left half done. On one rank."""
        _make(self.directory)
        self._lock = DirectoryLock([self.directory])
        for name in (_INCOMPLETE, _DISCARDED):
            _empty(self.directory / name)
        for step in sorted(self._steps())[:-1]:
            self._remove(step)

    def save(self, step: int, state: Mapping[str, torch.Tensor], description: dict[str, Any]) -> None:
        """Commit ``state`` (DTensors sharded by rows) to the drives, and drop older commits. Collective."""
        incomplete = self.directory / _INCOMPLETE

        def prepare() -> None:
            _make(self.directory)
            _empty(incomplete)
            _make(incomplete)

        def finish() -> None:
            files: dict[str, SavedFile] = {}
            pieces: dict[str, list[TensorPiece]] = {name: [] for name in state}
            for file, sizes, pieces_of_rank in filter(None, written):
                files[file] = SavedFile(*sizes)
                for name, saved in pieces_of_rank.items():
                    pieces[name] += [TensorPiece(*piece) for piece in saved]
            tensors = {}
            for name, value in state.items():
                in_order = tuple(sorted(pieces[name], key=lambda piece: piece.start))
                tensors[name] = SavedTensor(DTYPE_NAMES[value.dtype], tuple(value.shape), in_order)
            manifest = Manifest(incomplete, step, description, files, tensors)
            write_sealed(incomplete / MANIFEST, manifest.to_dict())  # syncs the folder: all files keep their names
            older = self._steps()
            with described("renaming", incomplete):
                incomplete.rename(self._folder(step))
            sync_directory(self.directory)
            for each in older:
                self._remove(each)

        broadcast_from_rank0(prepare)
        written = run_on_all_ranks(lambda: _write(incomplete, state))
        broadcast_from_rank0(finish)

    def load(self, manifest: Manifest, state: Mapping[str, torch.Tensor]) -> None:
        """Read a commit into the tensors of ``state``, however they are sharded. Collective."""
        folder = manifest.folder

        def read() -> None:
            if unmatched := sorted(manifest.tensors.keys() ^ state.keys()):
                raise FinetuneError(f"{folder} belongs to another model: {unmatched[0]} is in only one of them.")
            for name, value in state.items():
                saved, dtype, shape = manifest.tensors[name], DTYPE_NAMES[value.dtype], tuple(value.shape)
                if (saved.dtype, saved.shape) != (dtype, shape):
                    raise FinetuneError(
                        f"{folder} belongs to another model: {name} is {saved.dtype} {list(saved.shape)} there, and "
                        f"{dtype} {list(shape)} in this one."
                    )
                manifest.read_rows(name, cast(DTensor, value))

        run_on_all_ranks(read)

    def read_newest(self) -> Manifest | None:
        """Return the manifest of the newest commit, as rank 0 sees it. Collective."""
        step = broadcast_from_rank0(self.newest)
        if step is None:
            return None
        content = broadcast_from_rank0(lambda: Manifest.read(self._folder(step)).to_dict())
        return Manifest.from_dict(self._folder(step), content)

    def discard(self) -> None:
        """Remove all commits. For one rank to call."""
        for step in self._steps():
            self._remove(step)

    def verify(self) -> VerifiedCheckpoint:
        """Read all of the newest commit and compare it with its checksums. No run may be at work."""
        with DirectoryLock([self.directory], patience=0):
            step = self.newest()
            if step is None:
                raise UserError(f"The run in {self.directory} ended before its first commit.")
            sizes, sentences = zip(*Manifest.read(self._folder(step)).verify(), strict=True)
        return VerifiedCheckpoint(step, len(sizes), sum(sizes), [text for text in sentences if text is not None])

    def close(self) -> None:
        """Let other runs use the commits."""
        if self._lock is not None:
            self._lock.close()

    def _steps(self) -> list[int]:
        names = {path: re.fullmatch(r"step-(\d+)", path.name) for path in self.directory.glob("step-*")}
        return [int(match[1]) for path, match in names.items() if match and (path / MANIFEST).exists()]

    def _folder(self, step: int) -> Path:
        return self.directory / f"step-{step}"

    def _remove(self, step: int) -> None:
        """Remove a commit, which is renamed, and no commit any more, before any of it is deleted."""
        folder, away = self._folder(step), self.directory / _DISCARDED
        _empty(away)
        with described("renaming", folder):
            folder.rename(away)
        sync_directory(self.directory)
        _empty(away)


def _write(folder: Path, state: Mapping[str, torch.Tensor]) -> list[Any] | None:
    """Write this rank's rows. Ranks that hold the same rows alternate, tensor by tensor."""
    rank, shards = dist.get_rank(), {}
    for index, (name, tensor) in enumerate(state.items()):
        value = cast(DTensor, tensor)
        parts = value.device_mesh.size(value.device_mesh.ndim - 1)  # on consecutive ranks
        if index % (dist.get_world_size() // parts) == rank // parts and len(value.to_local()):
            shards[name] = value
    path = folder / f"rank-{rank:05d}.safetensors"
    return [path.name, *write_shards(path, shards)] if shards else None


def _make(directory: Path) -> None:
    """Make a directory and its parents, durably: a power cut does not take them away with what is in them."""
    if directory.is_dir():
        return
    _make(directory.parent)
    with described("making", directory):
        directory.mkdir()
    sync_directory(directory.parent)


def _empty(folder: Path) -> None:
    with described("removing", folder), contextlib.suppress(FileNotFoundError):
        for file in list(folder.iterdir()):
            file.unlink()
        folder.rmdir()
