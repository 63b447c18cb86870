"""Commits: whole states of a run on a file system that all nodes share, written by all ranks together.

A commit is a folder ``step-<N>`` that any number of ranks can load: a safetensors file from each rank, and a manifest
with places and checksums of all rows. It is written under another name, renamed once all of it is on the drives, and
only then the last one is removed: the newest commit is always whole."""

import contextlib
import itertools
import json
import math
import os
import re
import shlex
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from common.communication import broadcast_from_rank0, run_on_all_ranks
from common.errors import FinetuneError, UserError
from common.models.checkpoint.shards import DTYPES
from common.store import DirectoryLock
from common.store.checksums import checksum
from common.store.errors import StoreError, described, opened
from common.store.manifest import read_sealed, sync_directory, write_sealed
from fcdp.fsdp2 import row_range

MANIFEST = "commit.json"
IDENTITY = "commits.json"  # Name of the file next to commits with their random name
FORMAT = 2
# Of the largest piece, unless a row is larger; a rank that needs a row reads its piece
PIECE_BYTES = 16 << 20
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_REMEDY = (
    "Restore it from a copy, or begin again with --overwrite, from a checkpoint (--model) if there is one."
)
_INCOMPLETE = "incomplete"
_DISCARDED = "discarded"


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """The result of reading a whole commit."""

    step: int
    parts: int  # number of parts of tensors and files, each with a checksum
    nbytes: int  # bytes that were read
    damage: list[str]  # sentences, one for each part that is not what was written; names tensor and file


class _Part(NamedTuple):
    """Bytes of a file that have a checksum."""

    file: str
    offset: int
    nbytes: int
    sum: int  # by :func:`common.store.checksums.checksum`, from page 0
    what: str  # description for people


@dataclass(frozen=True)
class Commit:
    """The commit in ``folder``, by its manifest."""

    folder: Path
    step: int
    description: dict[str, Any]  # JSON of the trainer: which model it is, and what goes with the state
    files: dict[str, dict[str, int]]  # nbytes, header_nbytes, and header_sum of each rank's file
    # dtype as safetensors writes it, shape, and pieces of consecutive rows: file, offset, first row, end, checksum
    tensors: dict[str, dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> dict[str, Any]:
        """Return the fields of the commit in ``folder``, except the folder."""
        content = read_sealed(folder / MANIFEST)
        if content is None:
            raise FinetuneError(
                f"{folder} has lost its {MANIFEST}: it is no longer a commit. Restore it from a copy, or begin again "
                "with --overwrite."
            )
        if (version := content.pop("format", None)) != FORMAT:
            raise UserError(
                f"{folder} is a commit in format {version}. This version of the program reads format {FORMAT}. "
                "Continue the run with the version that began it, or begin again with --overwrite."
            )
        store = content.pop("store", "")
        known = (read_sealed(folder.parent / IDENTITY) or {}).get("store", "")
        step = content.get("step")
        is_of_another = bool(store and known and store != known)
        if is_of_another or (step is not None and folder.name != _folder_name(step)):
            raise UserError(
                f"{folder} holds step {step}{' of another run' if is_of_another else ''}, and was copied or renamed: "
                f"move it elsewhere, and put the commit of the run in {folder.parent} back."
            )
        return content

    def load(self, name: str, value: DTensor) -> None:
        """Fill this rank's rows of ``value`` with those saved as tensor ``name``, and compare their checksums."""
        saved = self.tensors[name]
        dtype = _DTYPE_NAMES[value.dtype]
        shape = list(value.shape)
        if [saved["dtype"], saved["shape"]] != [dtype, shape]:
            raise FinetuneError(
                f"{self.folder} belongs to another model: {name} is {saved['dtype']} {saved['shape']} there, and "
                f"{dtype} {shape} in this one."
            )
        first, last = row_range(value)
        for part, start, stop in self._pieces(name):
            low = max(first, start)
            high = min(last, stop)
            if low < high:
                rows = torch.from_numpy(self.read_part(part)).view(value.dtype).view(-1, *shape[1:])
                with torch.no_grad():
                    value.to_local()[low - first : high - first].copy_(rows[low - start : high - start])

    def verify(self) -> VerifiedCheckpoint:
        """Read everything and compare it with its checksums."""
        headers = [
            _Part(name, 0, file["header_nbytes"], file["header_sum"], f"{name} is damaged: its header")
            for name, file in self.files.items()
        ]
        pieces = [part for name in self.tensors for part, _, _ in self._pieces(name)]
        count = 0
        nbytes = 0
        damage = []
        for _, parts in itertools.groupby(sorted(headers + pieces), key=lambda part: part.file):
            for part in parts:
                count = count + 1
                nbytes = nbytes + part.nbytes
                try:
                    self.read_part(part)
                except StoreError as error:
                    damage.append(str(error))
                    if part.offset == 0:
                        break
        return VerifiedCheckpoint(self.step, count, nbytes, damage)

    def _pieces(self, name: str) -> Iterator[tuple[_Part, int, int]]:
        saved = self.tensors[name]
        row_nbytes = math.prod(saved["shape"][1:]) * DTYPES[saved["dtype"]].itemsize
        for file, offset, start, stop, expected in saved["pieces"]:
            what = f"{name} is damaged: its rows {start:,} to {stop - 1:,}"
            yield _Part(file, offset, (stop - start) * row_nbytes, expected, what), start, stop

    def read_part(self, part: _Part) -> np.ndarray:
        """Return the bytes of a part; a StoreError if they do not have its checksum."""
        path = self.folder / part.file
        if not path.exists():
            raise StoreError(f"{path} is gone. {_REMEDY}")
        nbytes = part.nbytes
        data = np.zeros(part.nbytes, np.uint8)
        done = 0
        with opened(path, "reading", os.O_RDONLY) as descriptor:
            size = os.fstat(descriptor).st_size
            expected = self.files[part.file]["nbytes"]
            if size != expected:
                raise StoreError(f"{path} has {size:,} bytes instead of {expected:,}. {_REMEDY}")
            while done < nbytes and (count := os.preadv(descriptor, [data[done:].data], part.offset + done)):
                done += count
        if checksum(data, 0) != part.sum:
            raise StoreError(
                f"{part.what}, bytes {part.offset:,} to {part.offset + nbytes - 1:,} of {path}, are not what was "
                f"written there. {_REMEDY}"
            )
        return data


class ShardedCheckpoints:
    """The commits of one run, in a directory that is the same on all nodes."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._lock: DirectoryLock | None = None

    def newest(self) -> int | None:
        return max(self._steps(), default=None)

    def describe(self, step: int) -> dict[str, Any]:
        description: dict[str, Any] = Commit.read(self._folder(step))["description"]
        return description

    def lock(self) -> None:
        """Keep other runs out until :meth:`close`, and remove what a killed run left half done. On one rank."""
        _make(self.directory)
        self._lock = DirectoryLock([self.directory])
        for name in (_INCOMPLETE, _DISCARDED):
            _empty(self.directory / name)

    def save(self, step: int, state: Mapping[str, torch.Tensor], description: dict[str, Any]) -> None:
        """Commit ``state`` (DTensors sharded by rows) to the drives, and drop older commits. Collective."""
        incomplete = self.directory / _INCOMPLETE

        def prepare() -> None:
            _empty(incomplete)
            _make(incomplete)

        def finish() -> None:
            files = {file: sizes for file, sizes, _ in filter(None, written)}
            tensors = {}
            for name, value in state.items():
                pieces = [piece for _, _, of_rank in filter(None, written) for piece in of_rank.get(name, ())]
                pieces.sort(key=lambda piece: piece[2])
                tensors[name] = {
                    "dtype": _DTYPE_NAMES[value.dtype],
                    "shape": list(value.shape),
                    "pieces": pieces,
                }
            content = {"step": step, "description": description, "files": files, "tensors": tensors}
            content["store"] = self.identity()
            # Syncs the folder, too: all files keep their names.
            write_sealed(incomplete / MANIFEST, {"format": FORMAT, **content})
            older = self._steps()
            with described("renaming", incomplete):
                incomplete.rename(self._folder(step))
            sync_directory(self.directory)
            Commit.read(self._folder(step))  # as written, before others go
            for each in older:
                self._remove(each)

        broadcast_from_rank0(prepare)
        written = run_on_all_ranks(lambda: _write(incomplete, state))
        broadcast_from_rank0(finish)

    def read_newest(self) -> Commit | None:
        """Return the newest commit, as rank 0 sees it; if these are locked, drop older ones. Collective.

        Raises:
            StoreError: the newest one is damaged, and there are others; these are kept.
        """
        step = broadcast_from_rank0(self.newest if self._lock is None else self._settled)
        if step is None:
            return None
        folder = self._folder(step)
        return Commit(folder, **broadcast_from_rank0(lambda: Commit.read(folder)))

    def load(self, commit: Commit, state: Mapping[str, torch.Tensor]) -> None:
        """Read a commit into the tensors of ``state``, however they are sharded. Collective."""

        def read() -> None:
            if unmatched := sorted(commit.tensors.keys() ^ state.keys()):
                raise FinetuneError(
                    f"{commit.folder} belongs to another model: {unmatched[0]} is in only one of them."
                )
            for name, value in state.items():
                commit.load(name, cast(DTensor, value))

        run_on_all_ranks(read)

    def begin(self) -> None:
        """Remove all commits, and give those to come a random name. For one rank to call."""
        for step in self._steps():
            self._remove(step)
        write_sealed(self.directory / IDENTITY, {"store": uuid.uuid4().hex})

    def remove(self) -> None:
        """Remove all commits, and the directory unless there are other files in it.

        Raises:
            UserError: a run uses them.
        """
        with DirectoryLock([self.directory], patience=0), described("removing", self.directory):
            for step in self._steps():
                self._remove(step)
            (self.directory / IDENTITY).unlink(missing_ok=True)
            sync_directory(self.directory)
        with contextlib.suppress(OSError):  # not empty
            self.directory.rmdir()

    def identity(self) -> str:
        """Return the random name of these commits; empty if they have none."""
        return str((read_sealed(self.directory / IDENTITY) or {}).get("store", ""))

    def verify(self) -> VerifiedCheckpoint:
        """Read all of the newest commit and compare it with its checksums. No run may be at work."""
        with DirectoryLock([self.directory], patience=0):
            step = self.newest()
            if step is None:
                raise UserError(
                    f"The run in {self.directory} ended before its first commit, so there is nothing to verify: enter "
                    "its command again, with --resume auto."
                )
            folder = self._folder(step)
            return Commit(folder, **Commit.read(folder)).verify()

    def close(self) -> None:
        """Let other runs use the commits."""
        if self._lock is not None:
            self._lock.close()

    def _steps(self) -> list[int]:
        names = {path: re.fullmatch(r"step-(\d+)", path.name) for path in self.directory.glob("step-*")}
        # Without its manifest, a commit is damaged: reading it is an error.
        return [
            int(match[1])
            for path, match in names.items()
            if match and ((path / MANIFEST).exists() or any(path.glob("rank-*.safetensors")))
        ]

    def _settled(self) -> int | None:
        """Return the newest step. Where a killed run has left more commits, read all of that one before others go."""
        steps = sorted(self._steps())
        if len(steps) < 2:
            return self.newest()
        *older, newest = steps
        folder = self._folder(newest)
        try:
            damage = Commit(folder, **Commit.read(folder)).verify().damage
        except FinetuneError as error:
            damage = [str(error)]
        if damage:
            raise StoreError(
                f"{damage[0].removesuffix(_REMEDY).rstrip()} Step {older[-1]:,} is there, too: to go back to it, "
                f"rm -r {shlex.quote(str(folder))}, then continue with --resume."
            )
        for step in older:
            self._remove(step)
        return newest

    def _folder(self, step: int) -> Path:
        return self.directory / _folder_name(step)

    def _remove(self, step: int) -> None:
        """Remove a commit, which is renamed, and no commit any more, before any of it is deleted."""
        folder = self._folder(step)
        away = self.directory / _DISCARDED
        _empty(away)
        with described("renaming", folder):
            folder.rename(away)
        sync_directory(self.directory)
        _empty(away)


def _folder_name(step: int) -> str:
    return f"step-{step}"


def _write(
    folder: Path, state: Mapping[str, torch.Tensor]
) -> tuple[str, dict[str, int], dict[str, list[Any]]] | None:
    """Write this rank's rows to a new file, which is synced. Ranks that hold the same rows alternate by tensor.

    Return the file's name, what the manifest has of it, and the pieces of tensors in it; None if the rank has none."""
    rank = dist.get_rank()
    shards = {}
    for index, (name, tensor) in enumerate(state.items()):
        value = cast(DTensor, tensor)
        parts = value.device_mesh.size(value.device_mesh.ndim - 1)  # on consecutive ranks
        if index % (dist.get_world_size() // parts) == rank // parts and len(value.to_local()):
            shards[name] = value.to_local().detach(), row_range(value)[0]
    if not shards:
        return None
    path = folder / f"rank-{rank:05d}.safetensors"
    pieces: dict[str, list[Any]] = {}
    header = _header({name: local for name, (local, _) in shards.items()})
    with opened(path, "writing", os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
        _write_all(descriptor, header)
        offset = len(header)
        for name, (local, first) in shards.items():
            pieces[name] = []
            step = max(1, PIECE_BYTES * len(local) // max(1, local.nbytes))
            for start in range(0, len(local), step):
                rows = local[start : start + step]
                data = rows.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                _write_all(descriptor, data)
                row = first + start
                pieces[name].append([path.name, offset, row, row + len(rows), checksum(data, 0)])
                offset += data.nbytes
        os.fsync(descriptor)
    sizes = {"nbytes": offset, "header_nbytes": len(header), "header_sum": checksum(header, 0)}
    return path.name, sizes, pieces


def _header(tensors: Mapping[str, torch.Tensor]) -> np.ndarray:
    """Return the start of a safetensors file, its length a multiple of 8 as the format requires."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, data in tensors.items():
        span = [offset, offset + data.nbytes]
        entries[name] = {"dtype": _DTYPE_NAMES[data.dtype], "shape": list(data.shape), "data_offsets": span}
        offset += data.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)


def _write_all(descriptor: int, data: np.ndarray) -> None:
    rest = data.data
    while rest:
        rest = rest[os.write(descriptor, rest) :]


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
