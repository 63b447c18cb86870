"""What is left of a run on the drives: stores of its ranks, whole or not, wherever they are seen from.

The stores of all ranks of a run together are a *set*: they say so by the run's random name, and each says which rank's
it is. A run that goes on with other ranks is a new set with a new name, which lists the stores that it replaces. As
long as a store of the new set is missing, the old set counts; from then on the new one does.
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
from fuyou.ranks.agreement import host, rank_name


@dataclass(frozen=True)
class Directory:
    """One directory of a store."""

    path: Path
    store: str
    index: int
    count: int
    replaces: tuple[str, ...]
    """Names of the stores whose place its own has taken, or is to take."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON, for the other ranks."""
        return {**asdict(self), "path": str(self.path)}

    @staticmethod
    def from_dict(told: dict[str, Any]) -> "Directory":
        """Undo :meth:`to_dict`."""
        return Directory(**{**told, "path": Path(told["path"]), "replaces": tuple(told["replaces"])})


@dataclass(frozen=True)
class LocalShard:
    """A rank's store with something committed in it."""

    directories: tuple[Path, ...]
    """In order, as the rank sees them that has found it."""
    store: str
    run: str
    share: Share
    """Whose it is."""
    steps: tuple[int, ...]
    """That it could continue from, newest first; none: directories of it are missing."""
    at_home: bool
    """Whether it is, or is beside, the store that the finder is to have: not another rank's, nor on other drives."""
    near: bool
    """Whether it is surely of the run that is to go on, and not of another one that lies beside it."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON, for the other ranks."""
        return {**asdict(self), "directories": [str(path) for path in self.directories]}

    @staticmethod
    def from_dict(told: dict[str, Any]) -> "LocalShard":
        """Undo :meth:`to_dict`."""
        paths = tuple(map(Path, told["directories"]))
        return LocalShard(
            **{**told, "directories": paths, "share": Share(**told["share"]), "steps": tuple(told["steps"])}
        )


@dataclass(frozen=True)
class Seen:
    """What one rank sees."""

    host: str
    directories: tuple[Directory, ...] = ()
    holdings: tuple[LocalShard, ...] = ()
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON, for the other ranks."""
        directories, holdings = ([one.to_dict() for one in some] for some in (self.directories, self.holdings))
        return {"host": self.host, "directories": directories, "holdings": holdings, "problem": self.problem}

    @staticmethod
    def from_dict(told: dict[str, Any]) -> "Seen":
        """Undo :meth:`to_dict`."""
        directories, holdings = (
            map(Directory.from_dict, told["directories"]),
            map(LocalShard.from_dict, told["holdings"]),
        )
        return Seen(told["host"], tuple(directories), tuple(holdings), told["problem"])


def look(drives: Drives) -> Seen:
    """All stores on ``drives``: in a rank's own folders, beside and around them, where other ranks of its node are."""
    try:
        directories = [found for path in _places(drives) if (found := _directory(path)) is not None]
        stores: dict[str, list[Directory]] = {}
        for directory in directories:
            stores.setdefault(directory.store, []).append(directory)
        holdings = [holding for members in stores.values() if (holding := _holding(members, drives)) is not None]
    except FinetuneError as error:
        return Seen(host(), problem=f"{host()}: {error}")
    return Seen(host(), tuple(directories), tuple(holdings))


@dataclass(frozen=True)
class FoundShard:
    """One rank's store, and by whom it was found."""

    finder: int
    holding: LocalShard


@dataclass(frozen=True)
class RunSet:
    """The stores of all ranks of a run."""

    run: str
    share: Share
    """Of its first rank."""
    members: dict[int, FoundShard]
    """By rank; where several have found the same, the one at home, else the first."""

    @property
    def missing(self) -> list[int]:
        """Ranks whose stores nobody has found whole."""
        there = {rank for rank, found in self.members.items() if found.holding.steps}
        return [rank for rank in range(self.share.world_size) if rank not in there]

    @property
    def newest(self) -> int:
        """Step that it can surely go on from, if nothing is missing."""
        return min(found.holding.steps[0] for found in self.members.values())

    def made_by(self, share: Share) -> bool:
        """Whether these are the stores of as many ranks in as many nodes."""
        return (self.share.nodes, self.share.ranks_per_node) == (share.nodes, share.ranks_per_node)

    @property
    def at_home(self) -> bool:
        """Whether every rank has found a store where its own is to be (though it may be another's)."""
        finders = {found.finder for found in self.members.values() if found.holding.at_home}
        return finders == set(range(self.share.world_size))


def sets_of(everyone: Sequence[Seen]) -> list[RunSet]:
    """The sets of the run that is to go on, of which there is more than one after a crash."""
    near = {holding.run for seen in everyone for holding in seen.holdings if holding.near}
    sets: dict[str, RunSet] = {}
    for finder, seen in enumerate(everyone):
        for holding in seen.holdings:
            if holding.run not in near:
                continue
            first = Share(holding.share.nodes, holding.share.ranks_per_node)
            members = sets.setdefault(holding.run, RunSet(holding.run, first, {})).members
            known = members.get(holding.share.rank)
            if known is None or _rank_of(holding) > _rank_of(known.holding):
                members[holding.share.rank] = FoundShard(finder, holding)
    return list(sets.values())


def choose(sets: Sequence[RunSet], share: Share, everyone: Sequence[Seen]) -> RunSet | None:
    """The set to go on with: whole; that of ``share``'s ranks, if it is where it is to be; else the newest. None: the
    ranks are those that it was made by, and something is missing, or there is nothing at all: opening it says what.

    Raises:
        UserError: it was made by other ranks, and of some of these there is nothing.
    """
    whole = [one for one in sets if not one.missing]
    if whole:
        return max(whole, key=lambda one: (one.made_by(share) and one.at_home, one.newest, one.made_by(share)))
    if not sets or any(one.made_by(share) for one in sets):
        return None
    lacking = min(sets, key=lambda one: len(one.missing))
    first = lacking.share
    names = [rank_name(first, rank, None) for rank in lacking.missing]
    problems = " ".join(seen.problem for seen in everyone if seen.problem)
    raise UserError(
        f"This run was made by {_ranks(first)} and is to go on with {_ranks(share)}, but what {' and '.join(names)} "
        f"had of its optimizer states is not here, and nobody else has it. Bring the drives (or a copy of the run's "
        "folders on them) to one of these nodes, and name them there with --leave-ssd; or go on with as many nodes and "
        f"ranks as before. {problems}".rstrip()
    )


def _ranks(share: Share) -> str:
    many = f"{share.nodes} node{'s' if share.nodes > 1 else ''}"
    return f"{many} with {share.ranks_per_node} rank{'s' if share.ranks_per_node > 1 else ''} each"


def _rank_of(holding: LocalShard) -> tuple[bool, tuple[int, ...]]:
    return holding.at_home, holding.steps


def _places(drives: Drives) -> Iterator[Path]:
    """Directories that may be a store's: each once."""
    places: dict[Path, None] = {}
    for folder in drives.everywhere:
        parent = folder.parent
        for path in (folder, successor_folder(folder), parent, *_inside(parent), *_inside(folder)):
            places[path] = None
    return iter(path for path in places if path.is_dir())


def _inside(folder: Path) -> Iterable[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else ()


def _directory(path: Path) -> Directory | None:
    identity = Identity.read(path)
    if identity is None:
        return None
    return Directory(path, identity.store, identity.index, identity.count, tuple(identity.replaces.split()))


def _holding(members: list[Directory], drives: Drives) -> LocalShard | None:
    by_index = {directory.index: directory.path for directory in members}
    if 0 not in by_index:
        return None
    content = load_manifest(by_index[0])
    if content is None:
        return None
    share, run, steps = Share(), members[0].store, [int(content["step"])]
    if (about := content.get(CLUSTER)) is not None:
        nodes, ranks = about["nodes"], about["ranks_per_node"]
        share, run = Share(nodes, ranks, *divmod(about["rank"], ranks)), about["run"]
        steps += [int(about["previous"]["step"])] if about["previous"] is not None else []
    paths = [by_index[index] for index in sorted(by_index)]
    own, home = (
        set(drives.folders),
        {path: folder for folder in drives.folders for path in (folder, successor_folder(folder))},
    )
    around = set(home) | {path.parent for path in drives.everywhere} | set(drives.leaving)
    return LocalShard(
        tuple(paths), members[0].store, run, share, tuple(steps) if len(paths) == members[0].count else (),
        at_home={home.get(path) for path in paths} == own,
        near=any(path in around or path.parent in own for path in paths),
    )  # fmt: skip
