"""Opening or creating a run on the SSDs: its directories, locked; its store, open; and its newest state."""

import contextlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.store import DirectoryLock, Layout, Store
from common.store.migration import clear_stale, lock_folders, remove_leftovers
from common.store.sealed import sync_directory
from fuyou.checkpoint.cluster_commits import find_common_state
from fuyou.checkpoint.commits import load_state
from fuyou.checkpoint.restripe import Drives, open_run
from fuyou.checkpoint.state import TrainingState
from fuyou.runtime.ranks.agreement import Agreement


def rank_folder(local_rank: int | str) -> str:
    """Return the name of a rank's folder in the run's directory on every SSD of its node."""
    return f"rank-{local_rank}"


@dataclass
class RunFiles:
    """The files of a run, open and locked until :meth:`close`."""

    lock: DirectoryLock
    store: Store
    state: TrainingState  # State that the store holds, or will hold when it is filled
    run: str  # Random name of the run, equal on all ranks; empty with a single one

    @classmethod
    def cleaned(cls, lock: DirectoryLock, store: Store, state: TrainingState, run: str) -> "RunFiles":
        """Return the files, after removing what a killed process has left beside the store.

        Raises:
            StoreError: a drive refuses that.
        """
        files = cls(lock, store, state, run)
        try:
            remove_leftovers(store)
        except BaseException:
            files.close()
            raise
        return files

    def close(self) -> None:
        """Close the store and let go of the directories."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.lock.close)
            stack.callback(self.store.close)


def resume_run(drives: Drives, wanted: TrainingState, agreement: Agreement, **io: Any) -> RunFiles:
    """Open the run that is on ``drives`` (or move it there), its records compared with their checksums.

    Args:
        drives: where it is to be, and may be; with several ranks, it is there already.
        wanted: what the run must be, apart from its step.
        agreement: with the other ranks; collective.
        io: how the store is opened, see :meth:`common.store.Store.open`.

    Raises:
        UserError: another process has it, or it cannot be continued as ``wanted``.
        FinetuneError: it is damaged.
    """
    if agreement.is_alone:
        lock, store, state = open_run(drives, lambda store: load_state(store, wanted), **io)
        return RunFiles.cleaned(lock, store, state, "")
    lock = DirectoryLock(folder for folder in drives.folders if folder.is_dir())
    try:
        return RunFiles.cleaned(lock, *find_common_state(agreement, lambda: Store.open(drives.folders, **io), wanted))
    except BaseException:
        lock.close()
        raise


def create_run(
    folders: Sequence[Path],
    layout: Layout,
    wanted: TrainingState,
    agreement: Agreement,
    overwrite: bool,
    **io: Any,
) -> RunFiles:
    """Create a new run with an empty store. An attempt that fails leaves no folder that was not there before.

    Args:
        folders: one per drive; made if they are not there.
        layout: layout of the store.
        wanted: the state that it will hold when it is filled.
        agreement: with the other ranks; collective.
        overwrite: replace a run that is there.
        io: how the store is created, see :meth:`common.store.Store.create`.

    Raises:
        UserError: another process has the directories, or there is a run, or no room.
    """
    run = "" if agreement.is_alone else agreement.all_gather_object(uuid.uuid4().hex)[0]
    made = [folder for folder in folders if not folder.exists()]
    lock = None
    try:
        for folder in made:
            folder.mkdir()
        lock = lock_folders(folders)
        for folder in made:
            sync_directory(folder.parent)  # or a power cut takes the folder, with every commit in it
        clear_stale(folders, overwrite)
        store = Store.create(folders, layout, overwrite=overwrite, **io)
    except BaseException:
        if lock is not None:
            lock.close()
        for folder in made:
            with contextlib.suppress(OSError):  # not empty, say: what went wrong first is what counts
                folder.rmdir()
        raise
    return RunFiles.cleaned(lock, store, replace(wanted, store=store.id), run)
