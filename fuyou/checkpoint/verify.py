"""``finetune --verify``: read the committed state of a run, and compare it with its checksums."""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import FinetuneError, UserError
from common.store import DirectoryLock, Store, load_manifest
from common.store.directories import IDENTITY_FILE, Identity
from common.store.migration import final_folder, successor_folder
from common.store.verify import verify
from fuyou.checkpoint.commits import CLUSTER, sealed_records
from fuyou.checkpoint.run_files import rank_folder
from fuyou.checkpoint.state import TrainingState


@dataclass(frozen=True)
class VerifiedRun:
    """What verifying one run has found."""

    directories: tuple[Path, ...]
    step: int  # Committed step whose state was read
    records: int
    nbytes: int
    damage: list[str]  # One sentence for each damaged record, which names the SSD and the file


def find_runs(places: Iterable[Path], may_have_none: Container[Path] = ()) -> list[list[Path]]:
    """Return the directories of all runs at ``places`` and directly in them, grouped by run.

    A run's folder may have a folder for each rank of a node, which counts as a run of its own.

    Args:
        places: where to look.
        may_have_none: places that need not have a run.

    Raises:
        UserError: there is none at one of the places, or a run was being moved to other drives.
    """
    runs: dict[str, list[Path]] = {}
    for place in places:
        found = 0
        for directory in _candidates(place):
            identity = Identity.read(directory) if directory.is_dir() else None
            if identity is not None:
                found += 1
                runs.setdefault(identity.store, []).append(directory)
                if directory != final_folder(directory) or successor_folder(directory).is_dir():
                    raise UserError(
                        f"The run in {final_folder(directory)} was moving to other drives when it was killed. Continue "
                        "it with --resume, which settles where it lies, and verify it then."
                    )
        if not found and place not in may_have_none:
            inside = [path for path in _inside(place) if any((part / IDENTITY_FILE).exists() for part in _inside(path))]
            hint = f" There are runs in {', '.join(map(str, inside))}: give these." if inside else ""
            raise UserError(
                f"There is no run in {place}. Give --verify the directories that --ssd names, or --output.{hint}"
            )
    return [list(dict.fromkeys(directories)) for directories in runs.values()]


def _candidates(place: Path) -> list[Path]:
    inside = _inside(place)
    return [place, *inside, *(rank for path in inside for rank in sorted(path.glob(rank_folder("*"))))]


def _inside(place: Path) -> list[Path]:
    return sorted(path for path in place.iterdir() if path.is_dir()) if place.is_dir() else []


def verify_run(directories: Sequence[Path]) -> VerifiedRun:
    """Verify the committed state of one run, which must not be in progress.

    Raises:
        UserError: it is in use, a directory is missing, or nothing was ever committed.
        FinetuneError: the store's description of itself is damaged.
    """
    identities = [Identity.read(directory) for directory in directories]
    there = {identity.index for identity in identities if identity is not None}
    count = max((identity.count for identity in identities if identity is not None), default=0)
    if missing := ", ".join(str(index + 1) for index in sorted(set(range(count)) - there)):
        raise UserError(
            f"The run in {', '.join(map(str, directories))} is striped over {count} drives, and only {len(there)} of "
            f"them {'are' if len(there) > 1 else 'is'} given: number {missing} is "
            "missing. Name the directories on all of them after --verify."
        )
    with DirectoryLock(directories), Store.open(directories, io="posix") as store:
        content = load_manifest(store.directories[0])
        if content is None:
            raise UserError(f"The run in {store.directories[0]} was ended before its weights were written.")
        content.pop(CLUSTER, None)  # each rank's records are verified by themselves
        state = TrainingState.from_dict(content)
        if state.torn:
            raise FinetuneError(
                f"The run in {store.directories[0]} keeps a single slot and was interrupted in the middle of step "
                f"{state.step + 1}: its state is a mixture of two steps."
            )
        sealed = sealed_records(store, state)
        nbytes, damage = verify(store, sealed)
        return VerifiedRun(store.directories, state.step, len(sealed), nbytes, damage)
