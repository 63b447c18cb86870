"""Continue a run with more or fewer ranks or nodes: redistribute records among them, crash-safely.

Every rank reads its drives' part of the old ranks' stores, sends it to its new owner (each byte goes over the network
once), and fills a new store next to its old one. When the new stores of all ranks are committed, the old ones are
removed and the new ones get their names. A crash before that leaves the old set, a crash after it the new one; the next
start detects which, and finishes or undoes the rest.
"""

import contextlib
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.errors import FinetuneError, UserError
from common.store import DirectoryLock, Store, StoreError, commit_manifest, load_manifest
from common.store.directories import Identity, check_space, freed_by, reserve, sparsify
from common.store.manifest import MANIFEST_FILE, sync_directory
from common.store.migration import final_folder, refuse_foreign_files, remove_folder, successor_folder
from common.store.verify import verify
from fuyou.checkpoint.cluster_commits import cluster_content, common_step
from fuyou.checkpoint.commits import CLUSTER, TrainingState, check_records, check_state
from fuyou.checkpoint.reshard.local_shards import (
    DriveScan,
    FoundShard,
    LocalShard,
    ShardSet,
    choose_shard_set,
    find_shard_sets,
    scan_drives,
)
from fuyou.checkpoint.reshard.transfer import RecordTransfer, ShardLayout, SourceShard
from fuyou.checkpoint.restripe import Drives
from fuyou.layout.model_layout import ModelLayout
from fuyou.layout.record import weights_file
from fuyou.layout.share import Share
from fuyou.runtime.ranks.agreement import Agreement, host, rank_name


def reshard_run(drives: Drives, layout: ModelLayout, expected: TrainingState, agreement: Agreement) -> None:
    """Make each rank's store that of this rank among the ranks there are now, on ``drives.folders``. Collective.

    Nothing happens where the run was made by as many ranks, each on its drives, or where there is no run. Opening it
    then says what is wrong, if anything is.

    Args:
        layout: that of the whole model, shared with nobody.
        expected: what the run must be, apart from its step.

    Raises:
        UserError: if something of the old ranks is missing, or there is too little space. Nothing was changed.
        FinetuneError: if a drive failed, or something is damaged.
    """
    _Resharding(drives, layout, expected, agreement).run()


class _Resharding:
    def __init__(self, drives: Drives, layout: ModelLayout, expected: TrainingState, agreement: Agreement):
        self._drives, self._layout, self._expected, self._agreement = drives, layout, expected, agreement
        self._share = agreement.share
        self._rank = self._share.rank

    def run(self) -> None:
        chosen, others, hosts = self._choose()
        if chosen is None:
            return
        # What a crash has left half done comes first: the new stores will be where unnamed ones are.
        if self._promote(chosen, others):
            chosen, _, hosts = self._choose()
        if chosen is not None and not (chosen.made_by(self._share) and chosen.in_place):
            self._promote(self._make_new_set(chosen, hosts), [chosen])

    def _choose(self) -> tuple[ShardSet | None, list[ShardSet], list[str]]:
        """Return the set to continue from (None if none is to be resharded), all other sets, and the ranks' hosts."""
        scan_here = scan_drives(self._drives)
        scans = [DriveScan.from_dict(content) for content in self._agreement.all_gather_object(scan_here.to_dict())]
        sets, hosts = find_shard_sets(scans), [scan.host for scan in scans]
        # A store that has replaced several ranks' may have more of them to remove, even if their manifests are gone.
        resharded = any(len(each.replaces) > 1 for each in scan_here.directories)
        if self._share.world_size == 1 and not resharded and all(each.share.world_size == 1 for each in sets):
            return None, [], hosts  # a single rank's run: only its number of drives may change (restripe.py)
        chosen = choose_shard_set(sets, self._share, scans)
        return chosen, [each for each in sets if chosen is None or each.run != chosen.run], hosts

    def _all_or_none(self, work: Callable[[], Any]) -> Any:
        result, problem, user, failure = None, "", True, None
        try:
            result = work()
        except FinetuneError as error:
            problem, user = f"{host()}: {error}" if not self._agreement.is_alone else str(error), error.exit_status == 2
        except BaseException as error:
            problem, failure = f"{host()}: {type(error).__name__}: {error}", error
        outcomes: list[tuple[str, bool]] = self._agreement.all_gather_object((problem, user))
        if failure is not None:
            raise failure
        problems = list(dict.fromkeys(problem for problem, _ in outcomes if problem))
        if problems:
            raise (UserError if all(user for _, user in outcomes) else StoreError)(" ".join(problems))
        return result

    # -- from an old set to a new one -----------------------------------------------------------------------------

    def _make_new_set(self, old: ShardSet, hosts: Sequence[str]) -> ShardSet:
        members = sorted(old.members.items())
        step = common_step(
            [(rank_name(old.share, rank, hosts[member.reader]), member.shard.steps) for rank, member in members]
        )
        run = self._agreement.all_gather_object(uuid.uuid4().hex)[0]
        mine = {rank: member.shard for rank, member in members if member.reader == self._rank}
        with DirectoryLock(path for shard in mine.values() for path in shard.directories):
            own_states: dict[int, TrainingState] = self._all_or_none(
                lambda: {rank: self._set_back(shard, step) for rank, shard in mine.items()}
            )
            states: dict[int, TrainingState] = {}
            described = [(rank, replace(state, checksums=[]).to_dict()) for rank, state in own_states.items()]
            for some in self._agreement.all_gather_object(described):
                states.update((rank, TrainingState.from_dict(state)) for rank, state in some)
            sources = [
                SourceShard(
                    self._layout_of(member.shard.share, len(member.shard.directories), states[rank]), member.reader
                )
                for rank, member in members
            ]
            counts: list[int] = self._agreement.all_gather_object(len(self._drives.folders))
            targets = [
                self._layout_of(share, count, states[0])
                for share, count in zip(self._share.everyone(), counts, strict=True)
            ]
            names = " ".join(member.shard.store for _, member in members)
            spare = [weights_file(slot) for slot in range(states[0].slots) if slot != states[0].slot]
            new = self._all_or_none(lambda: self._create_store(targets[self._rank], mine, spare, names))
            with new:
                self._fill(new, sources, mine, targets, states, run)
        new_shard = LocalShard(new.directories, new.id, run, self._share, (step,), in_place=True, of_this_run=True)
        first = Share(self._share.nodes, self._share.ranks_per_node)
        shards = map(LocalShard.from_dict, self._agreement.all_gather_object(new_shard.to_dict()))
        return ShardSet(run, first, {rank: FoundShard(rank, shard) for rank, shard in enumerate(shards)})

    def _set_back(self, shard: LocalShard, step: int) -> TrainingState:
        """Return an old store's state after ``step``, checked; from now on it is the only one that the store lists."""
        with Store.open(shard.directories, io="posix") as store:
            content = load_manifest(store.directories[0])
            assert content is not None
            cluster = content.pop(CLUSTER, None)
            if content["step"] != step:
                assert cluster is not None
                content = cluster["previous"]
            state = check_state(store, content, self._expected)
            check_records(store, state)
            if cluster is not None:
                commit_manifest(store.directories[0], {**state.to_dict(), CLUSTER: {**cluster, "previous": None}})
            return state

    def _layout_of(self, share: Share, directories: int, state: TrainingState) -> ShardLayout:
        return ShardLayout(self._layout, share, directories, state.slots, state.slot)

    def _create_store(self, target: ShardLayout, mine: dict[int, LocalShard], spare: list[str], replaces: str) -> Store:
        """Return an empty store next to this rank's folders; old stores free what does not count."""
        folders = [successor_folder(folder) for folder in self._drives.folders]
        what = f"for the run's part of rank {self._rank} of {self._share.world_size}"
        new, old = target.layout.file_bytes(), [path for shard in mine.values() for path in shard.directories]
        for gone, needed in (
            ([path / name for path in old for name in spare], [name for name in new if name not in spare]),
            ([file for path in old for file in path.iterdir() if file.is_file()], list(new)),
        ):
            check_space(self._drives.folders, sum(new[name] for name in needed), freed_by(gone), what)
        for its in self._drives.folders:
            _refuse_others(its, replaces.split())
        for folder, its in zip(folders, self._drives.folders, strict=True):
            remove_folder(folder)
            folder.mkdir()
            sync_directory(its.parent)
        for path in old:
            for name in spare:
                sparsify(path / name)
        return Store.create(folders, target.layout, io="posix", overwrite=True, later=spare, replaces=replaces)

    def _fill(
        self,
        new: Store,
        sources: Sequence[SourceShard],
        mine: dict[int, LocalShard],
        targets: Sequence[ShardLayout],
        states: dict[int, TrainingState],
        run: str,
    ) -> None:
        with contextlib.ExitStack() as stack:
            stores = {}
            for rank, shard in mine.items():
                stores[rank] = stack.enter_context(Store.open(shard.directories, io="posix"))
                if stores[rank].layout != sources[rank].layout.layout:
                    raise FinetuneError(f"The store in {shard.directories[0]} is not laid out as this model's.")
            sealed = RecordTransfer(sources, stores, targets, self._agreement).fill(new)
        new.sync(new.layout.file_bytes())
        _, damage = verify(new, sealed)
        if damage:
            raise FinetuneError(f"A drive does not return what was written to it; nothing was changed. {damage[0]}")
        state = replace(
            states[0],
            store=new.id,
            checksums=[entry.to_dict() for entry in sealed],
            # Ranks that there were not before begin as they would have begun the run.
            random=states[self._rank].random if self._rank in states else {},
            missed=_merge_counts(state.missed for state in states.values()),
        )
        content = state.to_dict()
        if not self._agreement.is_alone:
            content[CLUSTER] = cluster_content(run, self._share, None)
        commit_manifest(new.directories[0], content)

    # -- the set that counts --------------------------------------------------------------------------------------

    def _promote(self, chosen: ShardSet, others: Sequence[ShardSet]) -> bool:
        """Give the stores of the set that counts their final names, and remove all that it makes superfluous.

        These are the stores that it has replaced, and those that were to replace it. Every rank does it for what it has
        found.
        """
        scan = scan_drives(self._drives)
        stores = {member.shard.store for member in chosen.members.values()}
        names = self._agreement.all_gather_object([each.replaces for each in scan.directories if each.store in stores])
        replaced = {name for some in names for replaces in some for name in replaces}
        superfluous = self._superfluous(scan, stores, replaced, others)
        in_reach = [each.shard.directories for each in chosen.members.values() if each.reader == self._rank]
        unnamed = [directories for directories in in_reach if any(path != final_folder(path) for path in directories)]
        if not any(self._agreement.all_gather_object(bool(superfluous or unnamed))):
            return False
        for turn in range(self._share.world_size):  # several ranks may see the same
            if turn == self._rank:
                for path in filter(Path.is_dir, superfluous):  # first of all: without its manifest it is nothing
                    (path / MANIFEST_FILE).unlink(missing_ok=True)
                    sync_directory(path)
                for path in superfluous:
                    remove_folder(path, shared=True)
            self._agreement.all_gather_object(None)
        for directories in unnamed:
            for path in directories:
                if path != final_folder(path):
                    _refuse_others(final_folder(path), list(replaced))
                    remove_folder(final_folder(path))
                    path.rename(final_folder(path))
                    sync_directory(path.parent)
        for directories in in_reach:
            with Store.open(list(map(final_folder, directories)), io="posix") as store:
                layout = store.layout
            reserve(store.directories, layout)
        self._agreement.all_gather_object(None)
        return True

    def _superfluous(
        self, scan: DriveScan, stores: Collection[str], replaced: Collection[str], others: Sequence[ShardSet]
    ) -> list[Path]:
        old = [member for other in others for member in other.members.values() if member.shard.store in replaced]
        paths = [path for member in old if member.reader == self._rank for path in member.shard.directories]
        committed = {shard.store for shard in scan.shards}
        for directory in scan.directories:
            unfinished = directory.store not in stores and not {*directory.replaces}.isdisjoint(stores)
            if unfinished or (directory.store in replaced and directory.store not in committed):
                paths.append(directory.path)
        # Folders on drives to leave whose removal had all but ended, and new ones that had just been begun.
        paths += [path for path in self._drives.leaving if path.is_dir() and not any(path.iterdir())]
        successors = map(successor_folder, self._drives.everywhere)
        return paths + [path for path in successors if path.is_dir() and Identity.read(path) is None]


def _merge_counts(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Return the largest count of each name: each rank counts for its own parameters, and may list old counts of
    others."""
    merged: dict[str, int] = {}
    for known in counts:
        for name, count in known.items():
            merged[name] = max(count, merged.get(name, 0))
    return merged


def _refuse_others(folder: Path, ours: Collection[str]) -> None:
    """Refuse to remove or replace a folder that holds anything but the stores ``ours``."""
    refuse_foreign_files([folder], shared=True)
    identity = Identity.read(folder)
    if identity is not None and identity.store not in ours and load_manifest(folder) is not None:
        raise UserError(
            f"{folder} holds another run than the one that continues here. Move it elsewhere, or give other "
            "directories with --ssd."
        )
