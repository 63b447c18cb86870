"""Create and verify a run on the SSDs: its locked directories, its store, and its newest state."""

import contextlib
import uuid
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import distinct_paths
from common.store import DirectoryLock, Extent, Layout, Store, load_manifest
from common.store.checksums import PartSums
from common.store.directories import Identity
from common.store.errors import described
from common.store.folders import (
    final_folder,
    lock_folders,
    rank_folder,
    remove_leftovers,
    remove_successors,
    successor_folder,
)
from common.store.manifest import MANIFEST_FILE, sync_directory
from common.store.store import verify
from fuyou.checkpoint.commits import CLUSTER, TrainingState, sealed_records, state_of
from fuyou.runtime.ranks import Agreement


@dataclass
class RunFiles:
    """The files of a run, open and locked until :meth:`close`."""

    lock: DirectoryLock
    store: Store
    state: TrainingState  # State that the store holds, or will hold when it is filled
    run: str  # Random name of the run, equal on all ranks; empty with a single one
    # Checksums of the parts of every extent of the state
    sums: dict[Extent, PartSums] = field(default_factory=dict)

    def close(self) -> None:
        with self.lock:
            self.store.close()


def create_run(
    folders: Sequence[Path],
    layout: Layout,
    expected: TrainingState,
    agreement: Agreement,
    overwrite: bool,
    **io: Any,
) -> RunFiles:
    """Create a new run with an empty store. An attempt that fails leaves no folder that was not there before.

    Args:
        folders: one per drive; made if they are not there.
        expected: the state that it will hold when it is filled.

    Raises:
        UserError: if another process holds the directories, or there is a run, or too little space.
    """
    run = "" if agreement.is_alone else agreement.all_gather_object(uuid.uuid4().hex)[0]
    created = [folder for folder in folders if not folder.exists()]
    try:
        with contextlib.ExitStack() as opened:
            for folder in created:
                with described("creating", folder):
                    folder.mkdir()
            lock = opened.enter_context(lock_folders(folders))
            for folder in created:
                sync_directory(folder.parent)  # or a power cut takes the folder, with every commit in it
            remove_successors(folders, overwrite)
            store = opened.enter_context(Store.create(folders, layout, overwrite=overwrite, **io))
            remove_leftovers(store)
            opened.pop_all()
    except BaseException:
        for folder in created:
            with contextlib.suppress(OSError):  # not empty, say: what went wrong first is what counts
                folder.rmdir()
        raise
    return RunFiles(lock, store, replace(expected, store=store.id), run)


@dataclass(frozen=True)
class VerifiedRun:
    """What verifying one run has found."""

    directories: tuple[Path, ...]
    step: int  # Committed step whose state was read
    records: int
    nbytes: int
    damage: list[str]  # One sentence for each damaged record, which names the SSD and the file
    run: str = ""  # Random name of the run, equal on all ranks; empty with a single one
    steps: frozenset[int] = frozenset()  # Steps that it can continue from


def find_runs(paths: Iterable[Path], may_have_none: Container[Path] = ()) -> list[list[Path]]:
    """Return the directories of all runs at ``paths`` and directly in them, grouped by run.

    A run's folder may have a folder for each rank of a node, which counts as a separate run.

    Args:
        may_have_none: those of ``paths`` that need not have a run.

    Raises:
        UserError: if a path has no run, or a run was being moved to other drives.
    """
    runs: dict[str, list[Path]] = {}
    for path in paths:
        count = 0
        for directory in _candidates(path):
            identity = Identity.read(directory) if directory.is_dir() else None
            if identity is not None:
                count += 1
                runs.setdefault(identity.store, []).append(directory)
                if directory != final_folder(directory) or successor_folder(directory).is_dir():
                    raise UserError(
                        f"The run in {final_folder(directory)} was moving to other drives when it was killed. Continue "
                        "it with --resume, which settles where it lies, and verify it then."
                    )
        if not count and path not in may_have_none:
            raise UserError(
                f"There is no run in {path}. Name what --ssd or --output named: finetune verify DIR."
            )
    return [distinct_paths(directories) for directories in runs.values()]


def _candidates(folder: Path) -> list[Path]:
    inside = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    return [folder, *inside, *(rank for path in inside for rank in sorted(path.glob(rank_folder("*"))))]


def verify_run(directories: Sequence[Path]) -> VerifiedRun:
    """Verify the committed state of one run, which must not be in progress.

    Raises:
        UserError: if it is in use, a directory is missing, or nothing was ever committed.
        FinetuneError: if the store's identity is damaged.
    """
    with DirectoryLock(directories), Store.open(directories, io="posix", writes=False) as store:
        content = load_manifest(store.directories[0])
        if content is None:
            raise UserError(
                f"{store.directories[0] / MANIFEST_FILE} is missing: the run ended before its weights were written "
                "(enter its command again, with --resume auto), or that file was lost since (copy it back)."
            )
        cluster = content.pop(CLUSTER, None)  # each rank's records are verified alone
        state = state_of(store, content)
        sealed = sealed_records(store, state)
        nbytes, damage = verify(store, sealed)
        run = VerifiedRun(store.directories, state.step, len(sealed), nbytes, damage)
        if cluster is None:
            return run
        damage = [*_exchanged_ranks(store.directories, cluster), *damage]
        steps = frozenset({state.step, (cluster["previous"] or {}).get("step", state.step)})
        return replace(run, damage=damage, run=cluster["run"], steps=steps)


def without_common_step(runs: Iterable[VerifiedRun]) -> Iterator[tuple[str, str]]:
    """Yield the directories of each run whose ranks can continue from no common step, and a sentence about that."""
    ranks = defaultdict[str, list[VerifiedRun]](list)
    for rank in runs:
        if rank.run:
            ranks[rank.run].append(rank)
    for parts in ranks.values():
        if not frozenset.intersection(*(part.steps for part in parts)):
            steps = {", ".join(map(str, part.directories)): part.step for part in parts}
            held = "; ".join(f"{where} holds step {step:,}" for where, step in steps.items())
            yield (
                ", ".join(steps),
                f"No step is on all ranks: {held}. One of them is from an older copy: put its newest one back.",
            )


def _exchanged_ranks(directories: Iterable[Path], cluster: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each directory of a rank's store that lies in the folder of another rank."""
    expected = rank_folder(cluster["rank"] % cluster["ranks_per_node"])
    return [
        f"{path} holds the part of rank {cluster['rank']}, which is kept in {expected}: folders were exchanged, and "
        "the run is not continued. Move them back."
        for path in directories
        if path.match(rank_folder("*")) and path.name != expected
    ]
