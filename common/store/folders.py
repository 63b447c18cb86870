"""The folders of a run's stores: one of the same name on each drive, and next to it that of a successor.

A successor is created and filled next to a store, which stays as it was. Once it is committed, the old store is removed
and the successor gets its folders' names.
"""

import contextlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from common.errors import UserError
from common.store.directories import IDENTITY_FILE, LOCK_FILE, DirectoryLock, Identity, remove
from common.store.errors import described
from common.store.manifest import MANIFEST_FILE, load_manifest, sync_directory
from common.store.store import Store

SCRATCH = "scratch"  # Name of the folder inside a store's for what does not outlive a run: a separate store
_SUFFIX = ".new"


def successor_folder(folder: Path) -> Path:
    """Return the folder in which the successor of the store in ``folder`` is made."""
    return folder.with_name(folder.name + _SUFFIX)


def final_folder(directory: Path) -> Path:
    """Return the folder that a store in ``directory`` has once it is promoted; the same if it is no successor."""
    return directory.with_name(directory.name.removesuffix(_SUFFIX))


def rank_folder(local_rank: int | str) -> str:
    """Return the name of a rank's folder in the run's directory on every SSD of its node."""
    return f"rank-{local_rank}"


def run_places(folders: Iterable[Path]) -> Iterator[Path]:
    """Yield all places of a run's stores on drives where it has these folders; they need not exist.

    They are each folder, the one next to it where a move may have been interrupted, and those of ranks in it.
    """
    for folder in folders:
        with described("reading", folder):
            ranks = sorted(folder.glob(rank_folder("*")))
        yield from (folder, successor_folder(folder), *ranks)


def uncommitted_directories(folders: Sequence[Path]) -> list[Path]:
    """Return the directories of all stores in :func:`run_places` of ``folders``, which hold no commit.

    A store gets its first commit when it is filled. Without one it is worth nothing, if it is whole: then it was never
    filled.

    Raises:
        UserError: one is not whole, or was moving, so that a commit may be elsewhere.
    """
    stores: dict[str, dict[int, Path]] = defaultdict(dict)
    counts = {}
    for path in filter(Path.is_dir, run_places(folders)):
        identity = Identity.read(path)
        if path != final_folder(path) or (identity is not None and identity.replaces):
            raise UserError(
                f"The run in {final_folder(path)} was moving to other drives, and those given have no commit of it. "
                "Give all of its drives, old and new, with --ssd and --resume, or begin again with --overwrite."
            )
        if identity is not None and identity.complete:
            stores[identity.store][identity.index] = path
            counts[identity.store] = identity.count
    for store, paths in stores.items():
        if missing := sorted(set(range(counts[store])) - paths.keys()):
            numbers = ", ".join(str(index + 1) for index in missing)
            raise UserError(
                f"{', '.join(map(str, paths.values()))} is part of a run that is striped over {counts[store]} "
                f"directories, and number {numbers} is not among those given. Mount its drive, and give all "
                f"{counts[store]} with --ssd; or begin again with --overwrite."
            )
    return [path for paths in stores.values() for path in paths.values()]


def remove_uncommitted(folders: Sequence[Path]) -> None:
    """Remove the stores in ``folders`` that were never filled.

    Raises:
        UserError: as :func:`uncommitted_directories`; or another process fills them.
    """
    directories = uncommitted_directories(folders)
    if not directories:
        return
    with lock_folders(directories):
        if all(load_manifest(path) is None for path in directories):
            remove(directories)


def lock_folders(folders: Sequence[Path]) -> DirectoryLock:
    """Lock ``folders`` and those of their successors, as far as they exist; see :class:`DirectoryLock`."""
    while True:
        existing = _existing(folders)
        lock = DirectoryLock(existing)
        if _existing(folders) == existing:
            return lock
        lock.close()  # while we waited, another process has made other folders


def remove_folder(folder: Path, shared: bool = False) -> None:
    """Remove a store's folder, if it exists, with all files that this program makes in it.

    Args:
        shared: whether other files may be in it; then it stays, without the store.
    """
    for path in filter(Path.is_dir, (folder / SCRATCH, folder)):
        remove([path])
        with described("removal", path):
            for name in (IDENTITY_FILE + ".tmp", LOCK_FILE):
                (path / name).unlink(missing_ok=True)
            sync_directory(path)  # its successor gets its name: nothing of it may come back under that
            if not (shared and any(path.iterdir())):
                path.rmdir()
        sync_directory(path.parent)


def refuse_foreign_files(folder: Path) -> None:
    """Refuse a folder with files that this program did not create: they would be in a successor's way."""
    if not folder.is_dir():
        return
    identity = Identity.read(folder)
    ours = {IDENTITY_FILE, MANIFEST_FILE, *(identity.layout.file_bytes() if identity else ())}
    ours |= {name + ".tmp" for name in ours} | {LOCK_FILE, SCRATCH}
    for path in sorted(folder.iterdir()):
        if path.name not in ours and not (path.is_dir() and Identity.read(path)):
            raise UserError(
                f"{path} does not belong to a run. Move it elsewhere: the run's folder will be created again."
            )


def remove_leftovers(store: Store) -> None:
    """Remove what a killed run may have left in a store: scratch files and temporary ones."""
    for directory in store.directories:
        remove_folder(directory / SCRATCH)
        for name in store.layout.file_bytes():
            with described("removing", directory / f"{name}.tmp"):
                (directory / f"{name}.tmp").unlink(missing_ok=True)


def remove_successors(folders: Sequence[Path], overwrite: bool) -> None:
    """Remove successors that a crash has left next to the folders of a new run; refuse committed ones to be kept."""
    for directory in map(successor_folder, folders):
        if not overwrite and load_manifest(directory) is not None:
            raise UserError(
                f"{directory} holds a run already: add --resume to continue it or --overwrite to replace it."
            )
    for directory in map(successor_folder, folders):
        remove_folder(directory)


def _existing(folders: Collection[Path]) -> dict[Path, int]:
    inodes = {}
    for path in (path for folder in folders for path in (folder, successor_folder(folder))):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = path.stat()
            if path.is_dir():
                inodes[path] = status.st_ino
    return inodes
