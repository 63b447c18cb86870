"""Find the stores of a run on the drives, complete or not, wherever a rank can see them.

The store of one rank is a *shard*. The shards of all ranks of a run form a *set*: each names the run (by a random
name) and the rank that it belongs to. A run that moves to other drives or ranks is a new set with a new name, which
lists the stores that it replaces. As long as a shard of the new set is missing, the old set counts; from then on the
one with the newer step, and of equals the one in place.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common.errors import FinetuneError, UserError
from common.store import load_manifest
from common.store.directories import Identity
from common.store.folders import rank_folder, run_places, successor_folder
from common.units import counted
from fuyou.checkpoint.commits import CLUSTER
from fuyou.layout.share import Share
from fuyou.runtime.ranks import host, rank_name


@dataclass(frozen=True)
class Drives:
    """The folders of a run on all drives: where it is to be, and where else it may be now."""

    folders: Sequence[Path]  # Folders on the drives that it is to use
    leaving: Sequence[Path] = ()  # Folders on the drives that it is to leave

    @property
    def everywhere(self) -> list[Path]:
        return [*self.folders, *self.leaving]


SIBLING, OF_RUN, IN_FOLDERS, IN_PLACE = range(4)  # Locations of a shard, see `LocalShard.location`


@dataclass(frozen=True)
class LocalShard:
    """The store of one rank, with a committed step in it, as some rank sees it on its drives."""

    store: str  # Identity of the store
    directories: Sequence[str]  # Directories in order, as seen by the rank that has found them
    run: str  # Random name of the run
    nodes: int  # Number of nodes of the run
    ranks_per_node: int
    rank: int  # Rank that the store belongs to
    # Steps that it could continue from, newest first; empty if directories of it are missing
    steps: Sequence[int]
    replaces: Sequence[str]  # Identities of the stores that it replaces, or has replaced
    # IN_PLACE: where its finder's store is to be, or next to it. IN_FOLDERS: in some of these folders, or of those to
    # leave. OF_RUN: elsewhere, and certainly of the run to continue. SIBLING: another rank's, maybe of another run.
    location: int
    reader: int = 0  # Rank (of those running now) that has found it and will read it

    @property
    def share(self) -> Share:
        return Share(self.nodes, self.ranks_per_node, *divmod(self.rank, self.ranks_per_node))

    @property
    def paths(self) -> list[Path]:
        return [Path(directory) for directory in self.directories]


@dataclass(frozen=True)
class DriveScan:
    """All committed stores that one rank has found on its drives."""

    host: str
    shards: Sequence[LocalShard] = ()
    problem: str = ""  # Why it could not look, as a sentence; empty if it could

    @staticmethod
    def from_dict(content: dict[str, Any]) -> "DriveScan":
        return DriveScan(**{**content, "shards": [LocalShard(**shard) for shard in content["shards"]]})


def scan_drives(drives: Drives) -> tuple[DriveScan, dict[Path, Identity]]:
    """Find all stores on ``drives``: in the rank's folders and next to them (those of other ranks).

    Returns:
        The committed stores, and every directory of a store with its identity.
    """
    stores: dict[str, dict[Path, Identity]] = {}
    try:
        for path in run_places([*drives.everywhere, *map(_base, drives.everywhere)]):
            if path.is_dir() and (identity := Identity.read(path)) is not None:
                stores.setdefault(identity.store, {})[path] = identity
        shards = [shard for members in stores.values() if (shard := _read_shard(members, drives)) is not None]
    except FinetuneError as error:
        return DriveScan(host(), problem=str(error)), {}
    return DriveScan(host(), shards), {
        path: each for members in stores.values() for path, each in members.items()
    }


@dataclass(frozen=True)
class ShardSet:
    """The shards of all ranks of a run."""

    share: Share  # Share of the set's first rank, which says how many ranks there are
    # Shards by the rank that they belong to; where several ranks have found it, that in the better location.
    members: dict[int, LocalShard] = field(default_factory=dict)

    @property
    def missing(self) -> list[int]:
        """Ranks whose complete shards no rank has."""
        complete = {rank for rank, shard in self.members.items() if shard.steps}
        return [rank for rank in range(self.share.world_size) if rank not in complete]

    @property
    def newest(self) -> int:
        """Newest step that the set can certainly continue from, if nothing is missing."""
        return min(shard.steps[0] for shard in self.members.values())

    @property
    def stores(self) -> set[str]:
        return {shard.store for shard in self.members.values()}

    @property
    def replaced(self) -> set[str]:
        return {store for shard in self.members.values() for store in shard.replaces}

    def made_by(self, share: Share) -> bool:
        """Return whether the set was made by as many ranks on as many nodes as ``share`` counts."""
        return (self.share.nodes, self.share.ranks_per_node) == (share.nodes, share.ranks_per_node)

    def fits(self, share: Share) -> bool:
        """Return whether it was made by as many ranks, each of which has a shard where its store is to be."""
        readers = {shard.reader for shard in self.members.values() if shard.location == IN_PLACE}
        return self.made_by(share) and readers == set(range(self.share.world_size))

    def common_step(self, hosts: Sequence[str]) -> int:
        """Return the newest step that all shards have, if none is missing.

        Args:
            hosts: names of the hosts of the ranks that run now.

        Raises:
            UserError: if there is none.
        """
        if any(self.newest not in shard.steps for shard in self.members.values()):
            held = "; ".join(
                f"{rank_name(self.share, rank, hosts[shard.reader])} has {' and '.join(map(str, shard.steps))}"
                for rank, shard in sorted(self.members.items())
            )
            raise UserError(
                f"No step is on all nodes: {held}. One of them has come back with older drives, or with a copy of "
                "them: give it its newest ones."
            )
        return self.newest


def find_shard_sets(scans: Sequence[DriveScan]) -> list[ShardSet]:
    """Group the shards that all ranks have found into the sets of the run to continue.

    There is more than one set after a crash in the middle of a move.
    """
    runs = {shard.run for scan in scans for shard in scan.shards if shard.location}
    sets: dict[str, ShardSet] = {}
    for rank, scan in enumerate(scans):
        for shard in scan.shards:
            if shard.run not in runs:
                continue
            members = sets.setdefault(shard.run, ShardSet(Share(shard.nodes, shard.ranks_per_node))).members
            known = members.get(shard.rank)
            if known is None or (shard.location, shard.steps) > (known.location, known.steps):
                members[shard.rank] = replace(shard, reader=rank)
    return list(sets.values())


def choose_shard_set(sets: Sequence[ShardSet], share: Share, scans: Sequence[DriveScan]) -> ShardSet | None:
    """Choose the set to continue from: a complete one, in place if possible.

    Returns:
        The set; None if there is nothing at all, or if something is missing of a set that was made by as many ranks as
        now (opening its stores will say what).

    Raises:
        UserError: if the run was made by another number of ranks, and some of their shards are missing; or if there are
            two runs.
    """
    complete = [each for each in sets if not each.missing]
    if complete:
        likely = max(complete, key=lambda each: (each.fits(share), each.newest, each.made_by(share)))
        versions = [
            each
            for each in complete
            if each is likely or each.replaced & likely.stores or likely.replaced & each.stores
        ]
        for other in complete:
            shard = max(other.members.values(), key=lambda shard: shard.location)
            if other not in versions and shard.location >= IN_FOLDERS:
                raise another_run(shard.paths[0], f" in {likely.members[0].paths[0]}")
        # An old set and its successor have the same step until one of them continues, which then counts.
        return max(versions, key=lambda each: (each.newest, each.fits(share), each.made_by(share)))
    if not sets or any(each.made_by(share) for each in sets):
        return None
    lacking = min(sets, key=lambda each: len(each.missing))
    names = [rank_name(lacking.share, rank, None) for rank in lacking.missing]
    problems = " ".join(f"{scan.host}: {scan.problem}" for scan in scans if scan.problem)
    raise UserError(
        f"This run was made by {_describe_ranks(lacking.share)} and is to continue with {_describe_ranks(share)}, but "
        f"what {' and '.join(names)} had of its optimizer states is not here, and nobody else has it. Bring the drives "
        "(or a copy of the run's folders on them) to one of these nodes, and name them there with --leave-ssd; or "
        f"continue with as many nodes and ranks as before. {problems}".rstrip()
    )


def another_run(folder: Path, where: str = "") -> UserError:
    """Return the error that ``folder`` holds another run than the one that continues."""
    return UserError(
        f"{folder} holds another run than the one that continues here{where}. Move it elsewhere, or give other "
        "directories with --ssd."
    )


def describe_conflict(share: Share, scans: Sequence[DriveScan], problems: Sequence[str]) -> str:
    """Return why the ranks cannot continue together what each of them has.

    Args:
        problems: why each rank cannot open what it has; empty if it can.
    """
    described = []
    for rank, (scan, problem) in enumerate(zip(scans, problems, strict=True)):
        shard = max(scan.shards, key=lambda shard: shard.location, default=None)
        if shard is not None and not problem:
            where = "" if shard.location > SIBLING else "nothing in its own folder, and next to that "
            problem = f"holds {where}the part of rank {shard.rank} of run {shard.run[:8]}."
        described.append(f"{rank_name(share, rank, scan.host)}: {problem}")
    if all(problems):
        return f"There is nothing to continue. {' '.join(described)}"
    return (
        "Not all nodes can continue the run, of which each must hold its own part. Start them in the order in which "
        f"they began, with --ssd naming each node's own directories of one run. {' '.join(described)}"
    )


def _describe_ranks(share: Share) -> str:
    return f"{counted(share.nodes, 'node')} with {counted(share.ranks_per_node, 'rank')} each"


def _base(folder: Path) -> Path:
    """Return the folder of the whole run on a drive, in which each of several ranks has one."""
    return folder.parent if folder.match(rank_folder("*")) else folder


def _read_shard(members: Mapping[Path, Identity], drives: Drives) -> LocalShard | None:
    """Return the shard that ``members``, directories of one store, make up; None if nothing is committed there."""
    paths = sorted(members, key=lambda path: members[path].index)
    identity = members[paths[0]]
    content = load_manifest(paths[0]) if identity.index == 0 else None
    if content is None:
        return None
    cluster = content.get(CLUSTER)
    steps = [content.get("step", 0)]
    try:
        if cluster is not None:
            _ = str(cluster["run"]), [int(cluster[name]) for name in ("nodes", "ranks_per_node", "rank")]
            steps += [] if cluster["previous"] is None else [int(cluster["previous"]["step"])]
    except (TypeError, ValueError, KeyError) as error:
        raise FinetuneError(
            f"The manifest in {paths[0]} has no ranks that this program writes: it was edited."
        ) from error
    is_complete = [members[path].index for path in paths] == list(range(identity.count))
    return LocalShard(
        identity.store,
        list(map(str, paths)),
        identity.store if cluster is None else cluster["run"],
        1 if cluster is None else cluster["nodes"],
        1 if cluster is None else cluster["ranks_per_node"],
        0 if cluster is None else cluster["rank"],
        steps if is_complete else [],
        identity.replaces.split(),
        _location(paths, drives),
    )


def _location(paths: Sequence[Path], drives: Drives) -> int:
    folders = {path: folder for folder in drives.everywhere for path in (folder, successor_folder(folder))}
    occupied = {folders.get(path) for path in paths}
    if occupied == set(drives.folders):
        return IN_PLACE
    if occupied != {None}:
        return IN_FOLDERS
    bases = set(map(_base, drives.everywhere))
    return OF_RUN if any(path in bases or path.parent in drives.everywhere for path in paths) else SIBLING
