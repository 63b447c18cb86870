"""What a run says of itself, wherever it lies: the record in ``<output>/run``, and its newest commit. Imports nothing
slow."""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.errors import FinetuneError
from common.files import make_directory, read_text_file, replace_file
from common.store.directories import IDENTITY_FILE, Identity
from common.store.errors import described
from common.store.folders import run_places
from common.store.manifest import MANIFEST_FILE, load_manifest

STORE = "store"
COMMITS = "commits"
"""Folders inside the output directory: the store of a run without drives, and the commits of ranks in memory."""

RUN = "run"
DESCRIPTION = "run.json"
CONFIG = "config.toml"
METRICS = "metrics.jsonl"
TRACKERS = "trackers"
"""Folder inside the output directory that describes the run, and what is in it: a file that names the run's store, one
with all options, one with a line for every step, and a folder for what trackers write on this machine."""

# Folder inside the output directory for files of an earlier run, until a new one has a commit
REPLACED = ".replaced"

OPTIONS = "options"  # Key in a commit's user state of the run's options as TOML
# Key in a commit's user state: digest, steps, and hash of each file of references, by name
REFERENCES = "reference"
EVALUATIONS = (
    "evaluations"  # Key in a commit's user state: step and loss of the best evaluation, and of later ones
)
OUTPUT = "output"  # Key in the description and in a commit's user state of the output's path, without links
# Keys in the description
_STORES = "stores"
ENDED_AFTER = "ended_after"
_TAIL_BYTES = 1 << 16  # Bytes at the end of a file of metrics that are searched for the newest step


@dataclass(frozen=True)
class StorePlace:
    """A directory of a run's store."""

    path: str  # Absolute
    store: str  # Random name of the store
    index: int  # Number of this directory in its store

    def is_there(self) -> bool:
        """Return whether the directory still is what it was."""
        path = Path(self.path)
        with contextlib.suppress(FinetuneError, OSError):
            if path.name == COMMITS:
                return commits_identity(path) == self.store
            identity = Identity.read(path)
            return identity is not None and (identity.store, identity.index) == (self.store, self.index)
        return False

    @property
    def fault(self) -> str:
        """A sentence if the file that says which run's store it is has gone, and others have not; else empty."""
        path = Path(self.path)
        name = IDENTITY_FILE
        commit = MANIFEST_FILE
        if path.name == COMMITS:
            from fcdp.checkpoint import IDENTITY  # which takes long to import

            name = IDENTITY
            commit = "step-*"
        if (path / name).exists() or not any(path.glob(commit)):
            return ""
        return f"{path / name} is missing, which says which run's store is in {path}: copy it back."


@dataclass(frozen=True)
class RunRecord:
    """What ``<output>/run`` says of the run there, which has begun to take steps."""

    # All directories of its stores; empty if an earlier version has written it
    places: tuple[StorePlace, ...]
    last_step: int  # Newest step that is logged, which need not be committed
    steps: int | None  # Steps that it is to take, if that is known
    ended_after: int | None  # Step after which it was done; None: it is not

    @classmethod
    def read(cls, output: Path) -> "RunRecord | None":
        """Return what is known of the run in ``output``; None if there is no sign of one."""
        content = read_description(output)
        last_step = _last_step(output / RUN / METRICS)
        places = list[StorePlace]()
        steps = None
        ended = content.get(ENDED_AFTER)
        with contextlib.suppress(TypeError, ValueError, KeyError):
            for each in content[_STORES]:
                places.append(StorePlace(str(each["path"]), str(each["store"]), int(each["index"])))
        if not (places or last_step):
            return None
        with contextlib.suppress(TypeError, ValueError, KeyError, IndexError):
            steps = int(content["calls"][-1]["steps"])
        return cls(tuple(places), last_step, steps, ended if isinstance(ended, int) else None)


def read_description(output: Path) -> dict[str, Any]:
    """Return the description of the run in ``output``; empty if there is none that can be read."""
    return {_STORES: (), **read_json(output / RUN / DESCRIPTION)}


def read_json(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file; empty if there is none that can be read."""
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
        return dict(json.loads(read_text_file(file)))
    return {}


def store_places(folders: Iterable[Path]) -> Iterator[StorePlace]:
    """Yield the directories of stores that are in ``folders``."""
    for path in run_places(folders):
        if path.name == COMMITS:
            yield StorePlace(str(path.absolute()), commits_identity(path), 0)
        elif path.is_dir() and (identity := Identity.read(path)) is not None:
            yield StorePlace(str(path.absolute()), identity.store, identity.index)


def replaced_stores(folders: Iterable[Path]) -> set[str]:
    """Return the random names of the stores whose content has moved into those in ``folders``."""
    identities = [
        Identity.read(path) for path in run_places(folders) if path.is_dir() and path.name != COMMITS
    ]
    return {name for identity in identities if identity is not None for name in identity.replaces.split()}


def described_stores(folders: Iterable[Path]) -> dict[str, Any]:
    """Return what a description says of the stores in ``folders``, which are there."""
    return {_STORES: [asdict(place) for place in store_places(folders)]}


def note_end(output: Path, step: int, description: Mapping[str, Any] | None = None) -> None:
    """Note in the ``description``, or that which is there, that the run was done after ``step``, and all of its results
    are written."""
    path = output / RUN / DESCRIPTION
    content = {**(read_description(output) if description is None else description), ENDED_AFTER: step}
    with described("writing", path):
        make_directory(path.parent)
        replace_file(path, json.dumps(content, indent=2) + "\n")


def commits_identity(directory: Path) -> str:
    """Return the random name of the commits of ranks in memory in ``directory``; empty if they have none."""
    if not directory.is_dir():
        return ""
    from fcdp.checkpoint import ShardedCheckpoints  # which takes long to import

    return ShardedCheckpoints(directory).identity()


def committed_user_state(folders: Iterable[Path]) -> dict[str, Any]:
    """Return the user state of the newest commit in the first of ``folders`` that has one; empty if none has."""
    return dict(newest_commit(folders).get("user", {}))


def newest_commit(folders: Iterable[Path]) -> dict[str, Any]:
    """Return the newest commit in the first of ``folders`` that has one with a user state; empty if none has."""
    for folder in folders:
        with contextlib.suppress(FinetuneError, OSError):
            content = newest_in_memory(folder) if folder.name == COMMITS else _first_manifest(folder)
            if content and isinstance(content.get("user"), dict) and content["user"]:
                return content
    return {}


def _first_manifest(folder: Path) -> dict[str, Any] | None:
    return next(
        (content for path in run_places([folder]) if (content := load_manifest(path)) is not None), None
    )


def newest_in_memory(directory: Path) -> dict[str, Any] | None:
    """Return the newest commit of ranks in memory in ``directory`` with its step; None if they have none."""
    if not directory.is_dir():
        return None
    from fcdp.checkpoint import ShardedCheckpoints  # which takes long to import

    commits = ShardedCheckpoints(directory)
    newest = commits.newest()
    return None if newest is None else {**commits.describe(newest), "step": newest}


def _last_step(metrics: Path) -> int:
    """Return the newest step in a file of metrics; 0 if there is none."""
    last = 0
    if not metrics.is_file():  # opening a pipe would wait
        return last
    with contextlib.suppress(OSError), metrics.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        for line in file.read().splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError, OverflowError):
                last = max(last, int(json.loads(line)["step"]))
    return last
