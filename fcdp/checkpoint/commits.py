"""Commits: whole states of a run on a file system that all nodes share, written by all ranks together.

A commit is a folder ``step-<N>``: a safetensors file from each rank with the rows that it holds, and a manifest that
says where everything lies and what it comes to, so that any number of ranks can load it. It is written beside the last
one, under another name; it counts once all of it is on the drives and it is renamed, and only then the last one goes.
So whatever happens, the newest commit that is there is whole.
"""

import contextlib
import re
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from common.errors import FinetuneError, UserError
from common.object_collectives import broadcast_from_rank0, run_on_all_ranks
from common.store import DirectoryLock
from common.store.errors import described
from common.store.sealed import sync_directory, write_sealed
from fcdp.checkpoint.manifest import MANIFEST, Manifest, SavedFile, SavedTensor, TensorPiece, is_commit
from fcdp.checkpoint.pieces import Reader, Rows, dtype_name, write_rows
from fcdp.checkpoint.weights import row_range

_INCOMPLETE, _DISCARDED = "incomplete", "discarded"


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """What was found in a commit."""

    step: int
    parts: int
    """Of tensors and files, each with a checksum."""
    nbytes: int
    damage: list[str]
    """A sentence for each part that is not what was written; names tensor and file."""


class ShardedCheckpoints:
    """The commits of one run.

    Args:
        directory: the same on all nodes; made when needed.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._lock: DirectoryLock | None = None

    def newest(self) -> int | None:
        """The step of the newest commit; None if there is none."""
        return max(self._steps(), default=None)

    def describe(self, step: int) -> dict[str, Any]:
        """What the commit of ``step`` was saved with.

        Raises:
            UserError: it is in another format.
            FinetuneError: it is damaged.
        """
        return Manifest.read(self._folder(step)).description

    def lock(self) -> None:
        """Keep other runs away until :meth:`close`, or this process ends, and remove what a run that was killed left
        half done. For one rank to do.

        Raises:
            UserError: another run is at work here.
            StoreError: the directory cannot be made or locked.
        """
        _make(self.directory)
        self._lock = DirectoryLock([self.directory])
        for name in (_INCOMPLETE, _DISCARDED):
            _empty(self.directory / name)
        for step in sorted(self._steps())[:-1]:
            self._remove(self._folder(step))

    def save(self, step: int, state: Mapping[str, torch.Tensor], description: dict[str, Any]) -> None:
        """Commit ``state`` and drop older commits. Collective; on return it is on the drives.

        Args:
            state: DTensors sharded by rows, by name, the same names on every rank.
            description: JSON, for :meth:`describe`.

        Raises:
            FinetuneError: a rank could not write; on every rank, and the older commits are still there.
        """
        beside = self.directory / _INCOMPLETE
        broadcast_from_rank0(lambda: self._prepare(beside))
        told = run_on_all_ranks(lambda: _write_own(beside, state))
        broadcast_from_rank0(lambda: self._finish(beside, _assemble(step, state, description, told)))

    def load(self, manifest: Manifest, state: Mapping[str, torch.Tensor]) -> None:
        """Read a commit into the tensors of ``state``, however they are sharded. Collective.

        Raises:
            FinetuneError: it is damaged, or of another model; on every rank.
        """
        run_on_all_ranks(lambda: self._load_own(manifest, state))

    def read_newest(self) -> Manifest | None:
        """That of the newest commit, as rank 0 sees it. Collective.

        Raises:
            UserError, FinetuneError: as :meth:`Manifest.read`, on every rank.
        """
        content = broadcast_from_rank0(self._read_newest)
        return None if content is None else Manifest.from_dict(content)

    def discard(self) -> None:
        """Remove all commits. For one rank to do."""
        for step in self._steps():
            self._remove(self._folder(step))

    def verify(self) -> VerifiedCheckpoint:
        """Read all of the newest commit, which no run may be adding to.

        Raises:
            UserError: there is none, or it is in another format, or a run is in progress.
            FinetuneError: its manifest is damaged.
        """
        with DirectoryLock([self.directory], patience=0):
            step = self.newest()
            if step is None:
                raise UserError(f"The run in {self.directory} was ended before its first commit.")
            manifest = Manifest.read(self._folder(step))
            nbytes, parts, damage = 0, 0, []
            for read, sentence in Reader(self._folder(step), manifest).check_all():
                nbytes, parts = nbytes + read, parts + 1
                if sentence is not None:
                    damage.append(sentence)
        return VerifiedCheckpoint(step, parts, nbytes, damage)

    def close(self) -> None:
        """Let others in."""
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

    def _prepare(self, beside: Path) -> None:
        _make(self.directory)
        _empty(beside)
        _make(beside)

    def _finish(self, beside: Path, manifest: Manifest) -> None:
        write_sealed(beside / MANIFEST, manifest.to_dict())  # syncs the folder, and with it the names of all files
        older = self._steps()
        folder = self._folder(manifest.step)
        with described("renaming", beside):
            beside.rename(folder)
        sync_directory(self.directory)
        for step in older:
            self._remove(self._folder(step))

    def _remove(self, folder: Path) -> None:
        """So that it stops being a commit before any of it is gone."""
        away = self.directory / _DISCARDED
        _empty(away)
        with described("renaming", folder):
            folder.rename(away)
        sync_directory(self.directory)
        _empty(away)

    def _load_own(self, manifest: Manifest, state: Mapping[str, torch.Tensor]) -> None:
        folder = self._folder(manifest.step)
        if odd := sorted(manifest.tensors.keys() ^ state.keys()):
            raise FinetuneError(f"{folder} is of another model: {odd[0]} is in only one of them.")
        reader = Reader(folder, manifest)
        for name, value in state.items():
            saved, wanted = manifest.tensors[name], (dtype_name(value.dtype), tuple(value.shape))
            if (saved.dtype, saved.shape) != wanted:
                raise FinetuneError(
                    f"{folder} is of another model: {name} is {saved.dtype} {list(saved.shape)} there, and "
                    f"{wanted[0]} {list(wanted[1])} in this one."
                )
            reader.read(name, _own_rows(value))


def has_commits(directory: Path) -> bool:
    """Whether a run has committed anything in ``directory``."""
    return ShardedCheckpoints(directory).newest() is not None


def _own_rows(value: torch.Tensor) -> Rows:
    assert isinstance(value, DTensor)
    return Rows(row_range(value)[0], value.to_local())


def _write_own(folder: Path, state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Write the rows that are this rank's to write: where ranks have the same ones, they take turns, by tensor."""
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
    step: int, state: Mapping[str, torch.Tensor], description: dict[str, Any], told: list[dict[str, Any]]
) -> Manifest:
    pieces: dict[str, list[TensorPiece]] = {name: [] for name in state}
    files = {name: SavedFile(**file) for one in told for name, file in one["files"].items()}
    for one in told:
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
    """Make it, and what it lies in, so that a power cut does not take it away with all that is in it."""
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
