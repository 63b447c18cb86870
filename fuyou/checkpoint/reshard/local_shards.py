"""Finding what a run has left on the drives: the stores of its ranks, complete or not, wherever a rank can see them.

The store of one rank is a *shard*. The shards of all ranks of a run form a *set*: each names the run (by a random
name) and the rank that it belongs to. A run that continues with other ranks is a new set with a new name, which lists
the stores that it replaces. As long as a shard of the new set is missing, the old set counts; from then on the new one.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.errors import FinetuneError, UserError
from common.store import load_manifest
from common.store.directories import Identity
from common.store.migration import successor_folder
from fuyou.checkpoint.commits import CLUSTER
from fuyou.checkpoint.restripe import Drives
from fuyou.layout.share import Share
from fuyou.runtime.ranks.agreement import Agreement, host, rank_name


@dataclass(frozen=True)
class StoreDirectory:
    """One directory of a store."""

    path: Path
    store: str  # Identity of the store
    index: int  # Position among the store's directories
    count: int  # Number of the store's directories
    replaces: tuple[str, ...]  # Identities of the stores whose place this one has taken, or is to take

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path)}

    @staticmethod
    def from_dict(content: dict[str, Any]) -> "StoreDirectory":
        return StoreDirectory(**{**content, "path": Path(content["path"]), "replaces": tuple(content["replaces"])})


@dataclass(frozen=True)
class LocalShard:
    """The store of one rank, with a committed step in it, as some rank sees it on its drives."""

    directories: tuple[Path, ...]  # Directories in order, as seen by the rank that has found them
    store: str  # Identity of the store
    run: str  # Random name of the run
    share: Share  # Share of the rank that it belongs to
    steps: tuple[int, ...]  # Steps that it could continue from, newest first; empty if directories of it are missing
    in_place: bool  # Whether it is at the final location of its finder's store, or next to it
    of_this_run: bool  # Whether it certainly belongs to the run to continue, not to another run
    piece_bytes: int | None = None  # :attr:`fuyou.checkpoint.commits.TrainingState.piece_bytes` of the run

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "directories": [str(path) for path in self.directories]}

    @staticmethod
    def from_dict(content: dict[str, Any]) -> "LocalShard":
        paths, share = tuple(map(Path, content["directories"])), Share(**content["share"])
        return LocalShard(**{**content, "directories": paths, "share": share, "steps": tuple(content["steps"])})


@dataclass(frozen=True)
class DriveScan:
    """Everything that one rank has found on its drives."""

    host: str
    directories: tuple[StoreDirectory, ...] = ()
    shards: tuple[LocalShard, ...] = ()
    problem: str = ""  # Why it could not look, as a sentence; empty if it could

    def to_dict(self) -> dict[str, Any]:
        directories, shards = ([item.to_dict() for item in some] for some in (self.directories, self.shards))
        return {"host": self.host, "directories": directories, "shards": shards, "problem": self.problem}

    @staticmethod
    def from_dict(content: dict[str, Any]) -> "DriveScan":
        directories = tuple(map(StoreDirectory.from_dict, content["directories"]))
        return DriveScan(
            content["host"], directories, tuple(map(LocalShard.from_dict, content["shards"])), content["problem"]
        )


def scan_drives(drives: Drives) -> DriveScan:
    """Find all stores on ``drives``: in the rank's folders and next to them (those of other ranks)."""
    try:
        directories = [each for path in _candidates(drives) if (each := _read_directory(path)) is not None]
        stores: dict[str, list[StoreDirectory]] = {}
        for directory in directories:
            stores.setdefault(directory.store, []).append(directory)
        shards = [shard for members in stores.values() if (shard := _read_shard(members, drives)) is not None]
    except FinetuneError as error:
        return DriveScan(host(), problem=f"{host()}: {error}")
    return DriveScan(host(), tuple(directories), tuple(shards))


def stored_piece_bytes(drives: Drives, agreement: Agreement) -> int | None:
    """Return :attr:`fuyou.checkpoint.commits.TrainingState.piece_bytes` of the run to continue. Collective.

    A drive or a rank that is new to the run holds nothing of it, so all places of all ranks are looked at.

    Returns:
        None also where there is no run that can be read: opening it says what is wrong.
    """
    sizes = [shard.piece_bytes for shard in scan_drives(drives).shards if shard.of_this_run]
    return next((nbytes for some in agreement.all_gather_object(sizes) for nbytes in some), None)


@dataclass(frozen=True)
class FoundShard:
    """A shard, and the rank (of those running now) that has found it and will read it."""

    reader: int
    shard: LocalShard


@dataclass(frozen=True)
class ShardSet:
    """The shards of all ranks of a run."""

    run: str
    share: Share  # Share of the set's first rank, which says how many ranks there are
    # Shards by the rank that they belong to; where several ranks have found it, the one in place, else the first.
    members: dict[int, FoundShard]

    @property
    def missing(self) -> list[int]:
        """Ranks whose shards nobody has found complete."""
        complete = {rank for rank, member in self.members.items() if member.shard.steps}
        return [rank for rank in range(self.share.world_size) if rank not in complete]

    @property
    def newest(self) -> int:
        """Newest step that the set can certainly continue from, if nothing is missing."""
        return min(member.shard.steps[0] for member in self.members.values())

    def made_by(self, share: Share) -> bool:
        """Return whether the set was made by as many ranks on as many nodes as ``share`` counts."""
        return (self.share.nodes, self.share.ranks_per_node) == (share.nodes, share.ranks_per_node)

    @property
    def in_place(self) -> bool:
        """Whether every rank has found a shard where its own is to be (even if it belongs to another rank)."""
        readers = {member.reader for member in self.members.values() if member.shard.in_place}
        return readers == set(range(self.share.world_size))


def find_shard_sets(scans: Sequence[DriveScan]) -> list[ShardSet]:
    """Group the shards that all ranks have found into the sets of the run to continue.

    There is more than one set after a crash in the middle of resharding.
    """
    runs = {shard.run for scan in scans for shard in scan.shards if shard.of_this_run}
    sets: dict[str, ShardSet] = {}
    for rank, scan in enumerate(scans):
        for shard in scan.shards:
            if shard.run not in runs:
                continue
            first = Share(shard.share.nodes, shard.share.ranks_per_node)
            members = sets.setdefault(shard.run, ShardSet(shard.run, first, {})).members
            known = members.get(shard.share.rank)
            if known is None or _preference(shard) > _preference(known.shard):
                members[shard.share.rank] = FoundShard(rank, shard)
    return list(sets.values())


def choose_shard_set(sets: Sequence[ShardSet], share: Share, scans: Sequence[DriveScan]) -> ShardSet | None:
    """Choose the set to continue from.

    Only complete sets are considered: the one made by as many ranks as now, if it is in place; else the newest.

    Returns:
        The set; None if there is nothing at all, or if something is missing of a set that was made by as many ranks as
        now (opening its stores will say what).

    Raises:
        UserError: if the run was made by another number of ranks, and some of their shards are missing.
    """
    complete = [each for each in sets if not each.missing]
    if complete:
        return max(complete, key=lambda each: (each.made_by(share) and each.in_place, each.newest, each.made_by(share)))
    if not sets or any(each.made_by(share) for each in sets):
        return None
    lacking = min(sets, key=lambda each: len(each.missing))
    names = [rank_name(lacking.share, rank, None) for rank in lacking.missing]
    problems = " ".join(scan.problem for scan in scans if scan.problem)
    raise UserError(
        f"This run was made by {_describe_ranks(lacking.share)} and is to continue with {_describe_ranks(share)}, but "
        f"what {' and '.join(names)} had of its optimizer states is not here, and nobody else has it. Bring the drives "
        "(or a copy of the run's folders on them) to one of these nodes, and name them there with --leave-ssd; or "
        f"continue with as many nodes and ranks as before. {problems}".rstrip()
    )


def _describe_ranks(share: Share) -> str:
    nodes = f"{share.nodes} node{'s' if share.nodes > 1 else ''}"
    return f"{nodes} with {share.ranks_per_node} rank{'s' if share.ranks_per_node > 1 else ''} each"


def _preference(shard: LocalShard) -> tuple[bool, tuple[int, ...]]:
    return shard.in_place, shard.steps


def _candidates(drives: Drives) -> Iterator[Path]:
    candidates: dict[Path, None] = {}
    for folder in drives.everywhere:
        parent = folder.parent
        for path in (folder, successor_folder(folder), parent, *_entries(parent), *_entries(folder)):
            candidates[path] = None
    return iter(path for path in candidates if path.is_dir())


def _entries(folder: Path) -> Iterable[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else ()


def _read_directory(path: Path) -> StoreDirectory | None:
    identity = Identity.read(path)
    if identity is None:
        return None
    return StoreDirectory(path, identity.store, identity.index, identity.count, tuple(identity.replaces.split()))


def _read_shard(members: list[StoreDirectory], drives: Drives) -> LocalShard | None:
    """Return the shard that ``members``, directories of one store, make up; None if nothing is committed there."""
    by_index = {directory.index: directory.path for directory in members}
    if 0 not in by_index:
        return None
    content = load_manifest(by_index[0])
    if content is None:
        return None
    share, run, steps = Share(), members[0].store, [int(content["step"])]
    if (cluster := content.get(CLUSTER)) is not None:
        nodes, ranks = cluster["nodes"], cluster["ranks_per_node"]
        share, run = Share(nodes, ranks, *divmod(cluster["rank"], ranks)), cluster["run"]
        steps += [int(cluster["previous"]["step"])] if cluster["previous"] is not None else []
    paths = [by_index[index] for index in sorted(by_index)]
    folders, locations = (
        set(drives.folders),
        {path: folder for folder in drives.folders for path in (folder, successor_folder(folder))},
    )
    around = set(locations) | {path.parent for path in drives.everywhere} | set(drives.leaving)
    return LocalShard(
        tuple(paths),
        members[0].store,
        run,
        share,
        tuple(steps) if len(paths) == members[0].count else (),
        in_place={locations.get(path) for path in paths} == folders,
        of_this_run=any(path in around or path.parent in folders for path in paths),
        piece_bytes=content.get("piece_bytes"),
    )
