"""Resume a run, on the drives and ranks that there were or on others: then its records are copied to new stores first.

Every rank reads its drives' part of the old stores, sends it to its new owner (each byte goes over the network once),
and fills a new store, next to its old one where both are on a drive. The old stores stay as they were until the new
ones of all ranks are committed; then they are removed, and the new ones get their names. A crash before that leaves the
old set, a crash after it the new one; the next start detects which, and removes the rest of the other.
"""

import contextlib
import functools
import operator
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from common.activity import activity
from common.errors import FinetuneError, UserError
from common.store import DirectoryLock, Extent, Store, StoreError, commit_manifest, load_manifest
from common.store.checksums import ChecksummedExtent, PartSums
from common.store.directories import Identity, check_space
from common.store.folders import (
    final_folder,
    lock_folders,
    refuse_foreign_files,
    remove_folder,
    remove_leftovers,
    successor_folder,
)
from common.store.manifest import MANIFEST_FILE, sync_directory
from common.store.store import check_extent
from common.units import format_bytes
from fuyou.checkpoint.commits import CLUSTER, TrainingState, check_state, cluster_content, stored_sums
from fuyou.checkpoint.run_files import RunFiles
from fuyou.checkpoint.shards import (
    Drives,
    DriveScan,
    LocalShard,
    ShardSet,
    another_run,
    choose_shard_set,
    describe_conflict,
    find_shard_sets,
    scan_drives,
)
from fuyou.checkpoint.transfer import RecordTransfer, ShardLayout
from fuyou.layout.model_layout import ModelLayout
from fuyou.layout.share import Share
from fuyou.runtime.ranks import Agreement, host


def resume_run(
    drives: Drives, layout: ModelLayout, expected: TrainingState, agreement: Agreement, **io: Any
) -> RunFiles:
    """Open this rank's store of the run that is on ``drives``. Collective.

    If the run is on other drives than ``drives.folders``, or was made by another number of ranks, it moves first.

    Args:
        layout: that of the whole model, not one rank's share.
        expected: what the run must be, apart from its step.
        io: options of :meth:`common.store.Store.open`.

    Raises:
        UserError: if there is none, something of it is missing, another process holds it, it cannot be continued as
            ``expected``, or there is too little space to move it.
        FinetuneError: if a drive failed, or something is damaged.
    """
    return _Resumption(drives, layout, expected, agreement).run(io)


class _Resumption:
    def __init__(self, drives: Drives, layout: ModelLayout, expected: TrainingState, agreement: Agreement):
        self._drives = drives
        self._layout = layout
        self._expected = expected
        self._agreement = agreement
        self._share = agreement.share
        self._rank = agreement.share.rank
        self._successors = [successor_folder(folder) for folder in drives.folders]
        # Several ranks may be given the same drives to leave: the one that reads a store there locks it.
        self._locked = drives.everywhere if agreement.is_alone else drives.folders
        self._lock = DirectoryLock(())
        self._scans: list[DriveScan] = []  # What all ranks have found
        self._found: dict[Path, Identity] = {}  # All directories of stores on this rank's drives
        self._sums: dict[Extent, PartSums] = {}  # Checksums of everything in this rank's store

    def run(self, io: dict[str, Any]) -> RunFiles:
        with contextlib.ExitStack() as opened:
            self._lock = self._all_or_none(lambda: opened.enter_context(lock_folders(self._locked)))
            chosen = self._settle()
            moves = not chosen.fits(self._share)
            if moves:
                self._copy(chosen)
                chosen = self._settle()
            step = chosen.common_step(self._hosts)
            store = self._all_or_none(lambda: opened.enter_context(Store.open(self._drives.folders, **io)))
            state = self._all_or_none(lambda: self._state_after(store, step))
            if not moves:
                self._sums = self._all_or_none(lambda: self._stored_sums(store, self._share, state))
            remove_leftovers(store)  # of a killed process
            opened.pop_all()
        run = "" if self._agreement.is_alone else chosen.members[self._rank].run
        return RunFiles(self._lock, store, state, run, self._sums)

    def _all_or_none(self, work: Callable[[], Any]) -> Any:
        """Return what ``work`` returns, unless it fails on a rank: then raise on all of them."""
        if self._agreement.is_alone:
            return work()
        result = None
        problem = ""
        user = True
        failure = None
        try:
            result = work()
        except FinetuneError as error:
            problem = f"{host()}: {error}"
            user = error.exit_status == 2
        except BaseException as error:
            problem = f"{host()}: {type(error).__name__}: {error}"
            failure = error
        outcomes: list[tuple[str, bool]] = self._agreement.all_gather_object((problem, user))
        if failure is not None:
            raise failure
        problems = list(dict.fromkeys(problem for problem, _ in outcomes if problem))
        if problems:
            raise (UserError if all(user for _, user in outcomes) else StoreError)(" ".join(problems))
        return result

    def _state_after(self, store: Store, step: int | None = None) -> TrainingState:
        content = load_manifest(store.directories[0])
        cluster = content.pop(CLUSTER, None) if content is not None else None
        if content is not None and cluster is not None and step not in (None, content["step"]):
            content = cluster["previous"]
        return check_state(store, content, self._expected)

    def _stored_sums(self, store: Store, share: Share, state: TrainingState) -> dict[Extent, PartSums]:
        """Return the checksums of everything in the store of one rank."""
        shard = self._layout_of(share, len(store.directories), state)
        if store.layout != shard.layout:
            raise FinetuneError(f"The store in {store.directories[0]} is not laid out as this model's.")
        return stored_sums(store, state, shard.ends_by_extent())

    @property
    def _hosts(self) -> list[str]:
        return [scan.host for scan in self._scans]

    # -- the set that counts --------------------------------------------------------------------------------------

    def _settle(self) -> ShardSet:
        """Return the set to continue from, after removing what a move or a crash has left of others."""
        chosen = self._choose()
        if self._clear(chosen):
            chosen = self._choose()
        readers = [
            chosen.members[rank].reader for rank in range(self._share.world_size) if chosen.fits(self._share)
        ]
        if readers != sorted(readers):
            raise UserError(describe_conflict(self._share, self._scans, [""] * len(readers)))
        return chosen

    def _choose(self) -> ShardSet:
        scan, self._found = scan_drives(self._drives)
        self._scans = [DriveScan.from_dict(each) for each in self._agreement.all_gather_object(asdict(scan))]
        chosen = choose_shard_set(find_shard_sets(self._scans), self._share, self._scans)
        if chosen is not None:
            return chosen
        problem = ""
        try:
            self._explain(scan)
        except FinetuneError as error:
            if self._agreement.is_alone:
                raise
            problem = str(error)
        raise UserError(
            describe_conflict(self._share, self._scans, self._agreement.all_gather_object(problem))
        )

    def _explain(self, scan: DriveScan) -> None:
        """Raise the error why this rank cannot open what it has, if it cannot."""
        shard = max(scan.shards, key=lambda shard: shard.location, default=None)
        named = [folder for folder in self._drives.everywhere if folder in self._found]
        empty = [folder for folder in self._drives.folders if folder.is_dir() and folder not in self._found]
        try:
            with Store.open(
                shard.paths if shard else named or empty or self._drives.folders, writes=False
            ) as store:
                self._state_after(store)
        except UserError as error:
            if not named or not empty:
                raise
            raise UserError(f"{empty[0]} holds no run to continue. {error}") from None
        if scan.problem:
            raise StoreError(scan.problem)

    def _clear(self, chosen: ShardSet) -> bool:
        """Remove the stores that the set replaces, and those that were to replace it; give its own their final names.

        Every rank does it for what it has found. Returns whether there was anything to do.
        """
        superfluous = [
            path
            for path, identity in self._found.items()
            if identity.store in chosen.replaced
            or (
                identity.store not in chosen.stores
                and not chosen.stores.isdisjoint(identity.replaces.split())
            )
        ]
        # Folders on drives to leave whose removal had all but ended, and new ones that had just been begun.
        superfluous += [path for path in self._drives.leaving if path.is_dir() and not any(path.iterdir())]
        begun = filter(Path.is_dir, map(successor_folder, self._drives.everywhere))
        superfluous += [path for path in begun if Identity.read(path) is None]
        mine = [shard.paths for shard in chosen.members.values() if shard.reader == self._rank]
        unnamed = [path for paths in mine for path in paths if path != final_folder(path)]
        if not any(self._agreement.all_gather_object(bool(superfluous or unnamed))):
            return False
        for turn in range(self._share.world_size):  # several ranks may see the same
            if turn == self._rank:
                for path in filter(Path.is_dir, superfluous):
                    # First of all: without its manifest it is nothing
                    (path / MANIFEST_FILE).unlink(missing_ok=True)
                    sync_directory(path)
                for path in superfluous:
                    remove_folder(path, shared=True)
            self._agreement.all_gather_object(None)
        for path in unnamed:
            _refuse_others(final_folder(path), chosen.replaced)
            remove_folder(final_folder(path))
            path.rename(final_folder(path))
            sync_directory(path.parent)
        self._agreement.all_gather_object(None)
        return True

    # -- from an old set to a new one -----------------------------------------------------------------------------

    def _copy(self, old: ShardSet) -> None:
        """Copy the set to a new one, which replaces it as soon as the stores of all ranks are committed."""
        step = old.common_step(self._hosts)
        run = self._agreement.all_gather_object(uuid.uuid4().hex)[0]
        mine = [shard for shard in old.members.values() if shard.reader == self._rank]
        begun = False
        try:
            with contextlib.ExitStack() as stack:
                stores: dict[int, Store] = {}
                own_states: dict[int, TrainingState] = self._all_or_none(
                    lambda: {shard.rank: self._open_source(shard, step, stores, stack) for shard in mine}
                )
                sums: dict[int, dict[Extent, PartSums]] = self._all_or_none(
                    lambda: {
                        shard.rank: self._stored_sums(stores[shard.rank], shard.share, own_states[shard.rank])
                        for shard in mine
                    }
                )
                described = [
                    (rank, replace(state, checksums=[]).to_dict()) for rank, state in own_states.items()
                ]
                told = self._agreement.all_gather_object(described)
                states = {rank: TrainingState.from_dict(state) for some in told for rank, state in some}
                shards = [old.members[rank] for rank in sorted(old.members)]
                sources = [
                    self._layout_of(each.share, len(each.directories), states[each.rank]) for each in shards
                ]
                counts: list[int] = self._agreement.all_gather_object(len(self._drives.folders))
                targets = [
                    self._layout_of(share, count, states[0])
                    for share, count in zip(self._share.everyone(), counts, strict=True)
                ]
                target = targets[self._rank]
                self._all_or_none(lambda: self._check_room(target, old.stores))
                begun = True
                new = self._all_or_none(lambda: self._create(target, old.stores, stack))
                where = ", ".join(str(folder.parent) for folder in self._drives.folders)
                with activity(
                    f"moving the run: {format_bytes(_needed(target))} are copied to {where}", announced=True
                ):
                    readers = [shard.reader for shard in shards]
                    sealed = RecordTransfer(sources, readers, stores, sums, targets, self._agreement).fill(
                        new
                    )
                    self._all_or_none(lambda: self._commit(new, target, sealed, states, run))
        except BaseException:
            if begun:  # the old set is as it was
                with contextlib.suppress(FinetuneError, OSError):
                    for folder in self._successors:
                        remove_folder(folder)
            raise

    def _layout_of(self, share: Share, directories: int, state: TrainingState) -> ShardLayout:
        return ShardLayout(self._layout, share, directories, state.slot)

    def _open_source(
        self, shard: LocalShard, step: int, stores: dict[int, Store], stack: contextlib.ExitStack
    ) -> TrainingState:
        self._lock.add(path for path in shard.paths if final_folder(path) not in self._locked)
        store = stores[shard.rank] = stack.enter_context(Store.open(shard.paths, writes=False))
        return self._state_after(store, step)

    def _check_room(self, target: ShardLayout, replaced: Collection[str]) -> None:
        what = "to move the run, whose old copy stays until the new one is complete"
        for folder in self._drives.folders:
            _refuse_others(folder, replaced)
            remove_folder(successor_folder(folder))  # of an attempt that nothing is left of elsewhere
        check_space(self._drives.folders, _needed(target) // len(self._drives.folders), {}, what)

    def _create(self, target: ShardLayout, replaced: Iterable[str], stack: contextlib.ExitStack) -> Store:
        for folder in self._successors:
            folder.mkdir()
            sync_directory(folder.parent)
        self._lock.add(self._successors)
        return stack.enter_context(
            Store.create(self._successors, target.layout, replaces=" ".join(sorted(replaced)))
        )

    def _commit(
        self,
        new: Store,
        target: ShardLayout,
        sealed: list[ChecksummedExtent],
        states: dict[int, TrainingState],
        run: str,
    ) -> None:
        new.sync(new.layout.file_bytes())
        self._sums = {entry.extent: entry.sums for entry in sealed}
        try:
            for entry in sealed:
                check_extent(new, entry)
        except StoreError as error:
            raise FinetuneError(
                f"A drive does not return what was written to it; nothing was changed. {error}"
            ) from error
        state = replace(
            states[0],
            store=new.id,
            checksums=[entry.to_dict() for entry in sealed],
            # Ranks that there were not before begin as they would have begun the run.
            random=states[self._rank].random if self._rank in states else {},
            # Each rank counts for its own parameters, and may list old counts of others: the largest is right.
            missed=dict(functools.reduce(operator.or_, (Counter(state.missed) for state in states.values()))),
        )
        content = state.to_dict()
        if not self._agreement.is_alone:
            content[CLUSTER] = cluster_content(run, self._share, None)
        commit_manifest(new.directories[0], content)


def _needed(target: ShardLayout) -> int:
    return sum(target.layout.file_bytes().values()) * target.layout.directories


def _refuse_others(folder: Path, replaced: Collection[str]) -> None:
    """Refuse to remove or replace a folder that holds anything but the stores ``replaced``, or one never finished."""
    refuse_foreign_files(folder)
    identity = Identity.read(folder)
    if identity is not None and identity.complete and identity.store not in replaced:
        raise another_run(folder)
