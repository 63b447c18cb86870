"""A run goes on with more or fewer ranks or nodes: its records are dealt out anew, crash-safely.

Every rank reads what is on its drives of the old ranks' stores, sends it to whoever is to have it (each byte goes over
the network once), and fills a new store beside its old one. When the new stores of all ranks are committed, they count:
the old ones are removed and the new ones get their names. A crash before that leaves the old set, a crash after it the
new one; whoever opens the run next finds out which, and finishes or undoes the rest.
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
from common.store.manifest import MANIFEST_FILE
from common.store.migration import final_folder, refuse_foreign_files, remove_folder, successor_folder
from common.store.sealed import sync_directory
from common.store.verify import verify
from fuyou.checkpoint.cluster_commits import common_step
from fuyou.checkpoint.commits import CLUSTER, check_records, check_state
from fuyou.checkpoint.local_shards import FoundShard, LocalShard, RunSet, Seen, choose, look, sets_of
from fuyou.checkpoint.redistribute import Portion, Source, redistribute
from fuyou.checkpoint.restripe import Drives
from fuyou.checkpoint.state import TrainingState
from fuyou.layout.model_layout import ModelLayout
from fuyou.layout.record import weights_file
from fuyou.layout.share import Share
from fuyou.ranks.agreement import Agreement, host, rank_name


def regroup(drives: Drives, shape: ModelLayout, wanted: TrainingState, agreement: Agreement | None) -> None:
    """See to it that each rank's store is that of this rank among so many, on ``drives.folders``. Collective.

    Does nothing where the run was made by as many ranks, each on its drives, or where there is none. Then, as ever,
    opening it says what is wrong.

    Args:
        drives: this rank's.
        shape: of the whole model, shared with nobody.
        wanted: what the run must be, but for its step.
        agreement: with the other ranks, if there are any.

    Raises:
        UserError: something of the old ranks is missing, or there is too little space. Nothing was changed.
        FinetuneError: a drive failed, or something is damaged.
    """
    _Regrouping(drives, shape, wanted, agreement).run()


class _Regrouping:
    def __init__(self, drives: Drives, shape: ModelLayout, wanted: TrainingState, agreement: Agreement | None):
        self._drives, self._shape, self._wanted, self._agreement = drives, shape, wanted, agreement
        self._share = agreement.share if agreement is not None else Share()
        self._rank = self._share.rank

    def run(self) -> None:
        chosen, others, hosts = self._choose()
        if chosen is None:
            return
        # What a crash has left half done comes first: the new stores will be where unnamed ones are.
        if self._settle(chosen, others):
            chosen, _, hosts = self._choose()
        if chosen is not None and not (chosen.made_by(self._share) and chosen.at_home):
            self._settle(self._deal(chosen, hosts), [chosen])

    def _choose(self) -> tuple[RunSet | None, list[RunSet], list[str]]:
        """The set to go on with, if this is not another module's matter; all others; and the hosts of the ranks."""
        seen = look(self._drives)
        everyone = [Seen.from_dict(told) for told in self._tell(seen.to_dict())]
        sets, hosts = sets_of(everyone), [one.host for one in everyone]
        # What has taken the place of several ranks' stores may have more to settle, even if their manifests are gone.
        dealt = any(len(one.replaces) > 1 for one in seen.directories)
        if self._share.world_size == 1 and not dealt and all(one.share.world_size == 1 for one in sets):
            return None, [], hosts  # a single rank's run, whose number of drives is another matter
        chosen = choose(sets, self._share, everyone)
        return chosen, [one for one in sets if chosen is None or one.run != chosen.run], hosts

    def _tell(self, value: Any) -> list[Any]:
        return self._agreement.all_gather_object(value) if self._agreement is not None else [value]

    def _all_or_none(self, work: Callable[[], Any]) -> Any:
        """Do it on every rank; an error on any of them is one on all."""
        result, problem, user, failure = None, "", True, None
        try:
            result = work()
        except FinetuneError as error:
            problem, user = f"{host()}: {error}" if self._agreement is not None else str(error), error.exit_status == 2
        except BaseException as error:
            problem, failure = f"{host()}: {type(error).__name__}: {error}", error
        told: list[tuple[str, bool]] = self._tell((problem, user))
        if failure is not None:
            raise failure
        problems = list(dict.fromkeys(problem for problem, _ in told if problem))
        if problems:
            raise (UserError if all(user for _, user in told) else StoreError)(" ".join(problems))
        return result

    # -- from an old set to a new one -----------------------------------------------------------------------------

    def _deal(self, old: RunSet, hosts: Sequence[str]) -> RunSet:
        """Make the new set beside the old one, and commit it. Returns it."""
        step = common_step(
            [(rank_name(old.share, rank, hosts[found.finder]), found.holding.steps) for rank, found in _by_rank(old)]
        )
        run = self._tell(uuid.uuid4().hex)[0]
        mine = {rank: found.holding for rank, found in _by_rank(old) if found.finder == self._rank}
        with DirectoryLock(path for holding in mine.values() for path in holding.directories):
            states: dict[int, TrainingState] = self._all_or_none(
                lambda: {rank: self._set_back(holding, step) for rank, holding in mine.items()}
            )
            told: dict[int, TrainingState] = {}
            own = [(rank, replace(state, checksums=[]).to_dict()) for rank, state in states.items()]
            for some in self._tell(own):
                told.update((rank, TrainingState.from_dict(state)) for rank, state in some)
            sources = [
                Source(self._portion(found.holding.share, len(found.holding.directories), told[rank]), found.finder)
                for rank, found in _by_rank(old)
            ]
            counts: list[int] = self._tell(len(self._drives.folders))
            targets = [
                self._portion(share, count, told[0])
                for share, count in zip(self._share.everyone(), counts, strict=True)
            ]
            names = " ".join(found.holding.store for _, found in _by_rank(old))
            spare = [weights_file(slot) for slot in range(told[0].slots) if slot != told[0].slot]
            new = self._all_or_none(lambda: self._make(targets[self._rank], mine, spare, names))
            with new:
                self._fill(new, sources, mine, targets, told, run)
        made = LocalShard(new.directories, new.id, run, self._share, (step,), at_home=True, near=True)
        first = Share(self._share.nodes, self._share.ranks_per_node)
        everyone = map(LocalShard.from_dict, self._tell(made.to_dict()))
        return RunSet(run, first, {rank: FoundShard(rank, one) for rank, one in enumerate(everyone)})

    def _set_back(self, holding: LocalShard, step: int) -> TrainingState:
        """The state of ``step`` in an old store: from now on its only one, and as it was written."""
        with Store.open(holding.directories, io="posix") as store:
            content = load_manifest(store.directories[0])
            assert content is not None
            about = content.pop(CLUSTER, None)
            if content["step"] != step:
                assert about is not None
                content = about["previous"]
            state = check_state(store, content, self._wanted)
            check_records(store, state)
            if about is not None:
                commit_manifest(store.directories[0], {**state.to_dict(), CLUSTER: {**about, "previous": None}})
            return state

    def _portion(self, share: Share, directories: int, state: TrainingState) -> Portion:
        return Portion(self._shape, share, directories, state.slots, state.slot)

    def _make(self, target: Portion, mine: dict[int, LocalShard], spare: list[str], replaces: str) -> Store:
        """An empty store beside this rank's folders. The old stores give back the space of what does not count."""
        folders = [successor_folder(folder) for folder in self._drives.folders]
        what = f"for the run's part of rank {self._rank} of {self._share.world_size}"
        new, old = target.layout.file_bytes(), [path for one in mine.values() for path in one.directories]
        for gone, kept in (
            ([path / name for path in old for name in spare], [name for name in new if name not in spare]),
            ([file for path in old for file in path.iterdir() if file.is_file()], list(new)),
        ):
            check_space(self._drives.folders, sum(new[name] for name in kept), freed_by(gone), what)
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
        sources: Sequence[Source],
        mine: dict[int, LocalShard],
        targets: Sequence[Portion],
        told: dict[int, TrainingState],
        run: str,
    ) -> None:
        """Move everything, make it durable, see that it is there, and commit it."""
        with contextlib.ExitStack() as stack:
            stores = {}
            for rank, holding in mine.items():
                stores[rank] = stack.enter_context(Store.open(holding.directories, io="posix"))
                if stores[rank].layout != sources[rank].portion.layout:
                    raise FinetuneError(f"The store in {holding.directories[0]} is not laid out as this model's.")
            sealed = redistribute(sources, stores, targets, new, self._agreement)
        new.sync(new.layout.file_bytes())
        _, damage = verify(new, sealed)
        if damage:
            raise FinetuneError(f"A drive does not return what was written to it; nothing has changed. {damage[0]}")
        state = replace(
            told[0], store=new.id, checksums=[one.to_dict() for one in sealed],
            # Ranks that there were not before begin as they would have begun the run.
            random=told[self._rank].random if self._rank in told else {},
            missed=_joined(state.missed for state in told.values()),
        )  # fmt: skip
        content = state.to_dict()
        if self._agreement is not None:
            content[CLUSTER] = {
                "run": run, "nodes": self._share.nodes, "ranks_per_node": self._share.ranks_per_node,
                "rank": self._rank, "previous": None,
            }  # fmt: skip
        commit_manifest(new.directories[0], content)

    # -- the set that counts --------------------------------------------------------------------------------------

    def _settle(self, chosen: RunSet, others: Sequence[RunSet]) -> bool:
        """Remove the stores that the set has replaced, and those that were to replace it; give its own their names.

        Every rank does it for what it has found. Returns whether there was anything to do, on any of them.
        """
        seen = look(self._drives)
        stores = {found.holding.store for found in chosen.members.values()}
        names = self._tell([one.replaces for one in seen.directories if one.store in stores])
        replaced = {name for some in names for replaces in some for name in replaces}
        old = [found for other in others for found in other.members.values() if found.holding.store in replaced]
        lost = [path for found in old if found.finder == self._rank for path in found.holding.directories]
        committed = {one.store for one in seen.holdings}
        for one in seen.directories:
            unfinished = one.store not in stores and stores & {*one.replaces}
            if unfinished or (one.store in replaced and one.store not in committed):
                lost.append(one.path)
        lost += [path for path in self._drives.leaving if path.is_dir() and not any(path.iterdir())]  # removed, almost
        places = map(successor_folder, self._drives.everywhere)
        lost += [path for path in places if path.is_dir() and Identity.read(path) is None]  # just begun
        found = [one.holding.directories for one in chosen.members.values() if one.finder == self._rank]
        unnamed = [directories for directories in found if any(path != final_folder(path) for path in directories)]
        if not any(self._tell(bool(lost or unnamed))):
            return False
        for turn in range(self._share.world_size):  # several ranks may see the same
            if turn == self._rank:
                for path in filter(Path.is_dir, lost):  # before anything else of it: without its manifest it is nothing
                    (path / MANIFEST_FILE).unlink(missing_ok=True)
                    sync_directory(path)
                for path in lost:
                    remove_folder(path, shared=True)
            self._tell(None)
        for directories in unnamed:
            for path in directories:
                if path != final_folder(path):
                    _refuse_others(final_folder(path), list(replaced))
                    remove_folder(final_folder(path))
                    path.rename(final_folder(path))
                    sync_directory(path.parent)
        for directories in found:
            with Store.open(list(map(final_folder, directories)), io="posix") as store:
                layout = store.layout
            reserve(store.directories, layout)
        self._tell(None)
        return True


def _by_rank(old: RunSet) -> list[tuple[int, FoundShard]]:
    return sorted(old.members.items())


def _joined(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Return what ranks know together that each count for their own parameters; what others count may be old there."""
    joined: dict[str, int] = {}
    for known in counts:
        for name, count in known.items():
            joined[name] = max(count, joined.get(name, 0))
    return joined


def _refuse_others(folder: Path, ours: Collection[str]) -> None:
    """What is not of the stores ``ours`` would be in the way when the folder is made anew, or be lost with it."""
    refuse_foreign_files([folder], shared=True)
    identity = Identity.read(folder)
    if identity is not None and identity.store not in ours and load_manifest(folder) is not None:
        raise UserError(
            f"{folder} holds another run than the one that goes on here. Move it elsewhere, or give other directories "
            "with --ssd."
        )
