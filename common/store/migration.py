"""Replace a store by one on other drives: a crash at any instant leaves one of the two whole.

A store lies in a folder of one name on each of its drives. Its successor is made in folders next to those, filled,
synced and committed, while the old one stays as it was. The change takes place when the old manifest is removed: until
then the old store is the run's, and a successor is discarded after a crash; from then on the new one is, and after a
crash the rest of the old one is removed and the new folders get the old names.

Old files that hold nothing committed give their space back first, and their successors get it at the end. So a
migration needs no more space than the larger of the two stores, except for files that exist in one copy only.
"""

import contextlib
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from common.errors import FinetuneError, UserError
from common.store.directories import (
    IDENTITY_FILE,
    Identity,
    check_space,
    find_directories,
    freed_by,
    remove,
    reserve,
    sparsify,
)
from common.store.errors import StoreError, describe_os_error, described
from common.store.layout import Layout
from common.store.lock import LOCK_FILE, DirectoryLock
from common.store.manifest import MANIFEST_FILE, load_manifest, read_sealed, sync_directory, write_sealed
from common.store.store import Store

SCRATCH = "scratch"  # Name of the folder inside a store's for what does not outlive a run: a separate store
_SUFFIX = ".new"
_MOVED_FILE = "moved.json"  # File in an old store's directory that names the new store


def successor_folder(folder: Path) -> Path:
    """Return the folder in which the successor of the store in ``folder`` is made."""
    return folder.with_name(folder.name + _SUFFIX)


def final_folder(directory: Path) -> Path:
    """Return the folder that a store in ``directory`` has once it is promoted; the same if it is no successor."""
    return directory.with_name(directory.name.removesuffix(_SUFFIX))


def lock_folders(folders: Sequence[Path]) -> DirectoryLock:
    """Lock ``folders`` and those of their successors, as far as they exist.

    Raises:
        UserError: if another process holds one of them.
        StoreError: if one cannot be opened.
    """
    while True:
        existing = _existing(folders)
        lock = DirectoryLock(existing)
        if _existing(folders) == existing:
            return lock
        lock.close()  # while we waited, another process has made other folders


def recover(folders: Sequence[Path]) -> list[Path]:
    """Finish or undo a migration that a crash has interrupted; return the directories of the run's store, in order.

    Args:
        folders: a folder for each drive, locked; they need not exist.

    Raises:
        UserError, StoreError: as :func:`common.store.directories.find_directories`. Nothing was changed.
    """
    named = [folder for folder in folders if _holds_store(folder)]
    new = [successor_folder(folder) for folder in folders if successor_folder(folder).is_dir()]
    if not new:
        committed = [directory for members in _stores(named) if _is_committed(members) for directory in members]
        _remove_moved_files(committed)
        if not committed:
            _refuse_remains(folders)
        return _find(named, [folder for folder in folders if folder.is_dir() and folder not in named], folders)
    for members in _stores(named):
        if _is_committed(members):
            ordered, identity = find_directories(named)
            remove(new)  # and only then, there is space to reserve
            reserve(ordered, identity.layout)
            discard_successors(folders)
            _remove_moved_files(ordered)
            return ordered
    candidates = _stores([*named, *new])
    for members in candidates:
        if _is_committed(members):
            return promote(find_directories(members)[0], folders)
    _refuse_remains(folders)
    # What was committed comes first: it is what the user has to complete.
    best = min(candidates, key=lambda members: not any(map(load_manifest, members)), default=folders)
    return find_directories(best)[0]


def remove_folder(folder: Path, shared: bool = False) -> None:
    """Remove a store's folder, if it exists, with all files that this program makes in it.

    Args:
        shared: whether other files may be in it; then it stays, without the store.

    Raises:
        StoreError: if a drive refuses, or there are other files in it.
    """
    for path in filter(Path.is_dir, (folder / SCRATCH, folder)):
        remove([path])
        with described("removal", path):
            for name in (IDENTITY_FILE + ".tmp", LOCK_FILE, _MOVED_FILE + ".tmp", _MOVED_FILE):
                (path / name).unlink(missing_ok=True)
            sync_directory(path)  # its successor gets its name: nothing of it may come back under that
            if not (shared and any(path.iterdir())):
                path.rmdir()
        sync_directory(path.parent)


def refuse_foreign_files(folders: Iterable[Path], shared: bool = False) -> None:
    """Refuse folders with files of others: they could not be removed in the end, and would be in a successor's way.

    Args:
        folders: folders of stores, empty ones, or ones that do not exist.
        shared: whether stores inside them are no obstacle, since they will have been removed by then.

    Raises:
        UserError: if one of them holds a file that this program did not create.
    """
    for folder in filter(Path.is_dir, folders):
        identity = Identity.read(folder)
        ours = {IDENTITY_FILE, MANIFEST_FILE, _MOVED_FILE, *(identity.layout.file_bytes() if identity else ())}
        ours |= {name + ".tmp" for name in ours} | {LOCK_FILE, SCRATCH}
        for path in sorted(folder.iterdir()):
            if path.name not in ours and not (shared and _holds_store(path)):
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


def discard_successors(folders: Sequence[Path]) -> None:
    """Remove the successors of the stores in ``folders``."""
    for directory in map(successor_folder, folders):
        remove_folder(directory)


def make_successor(old: Store, folders: Sequence[Path], layout: Layout, spare: Collection[str]) -> Store:
    """Create an empty store next to ``folders``, to be filled and committed; the old one is still the run's.

    Args:
        old: the store, in folders of that name; closed, since otherwise its spare files keep their space.
        folders: the run's folders on all drives that it is to have; they need not exist.
        spare: files of both stores that hold nothing committed: the content of the old ones is lost, and the new ones
            have no space yet.

    Raises:
        UserError: if there is too little space, or a foreign file. Nothing was changed.
        StoreError: if a drive refuses; created files are removed again.
    """
    all_folders, new = (
        list(dict.fromkeys([*old.directories, *folders])),
        [successor_folder(folder) for folder in folders],
    )
    refuse_foreign_files(all_folders)
    _check_space(old, folders, layout, spare)
    try:
        for directory in new:
            directory.mkdir(exist_ok=True)
            sync_directory(directory.parent)
        for directory in old.directories:
            for name in spare:
                sparsify(directory / name)
        return Store.create(new, layout, io="posix", overwrite=True, later=spare, replaces=old.id)
    except BaseException as error:
        with contextlib.suppress(FinetuneError):
            abandon_successor(old, folders)
        if isinstance(error, OSError):
            raise describe_os_error("making", Path(error.filename or successor_folder(folders[0])), error) from error
        raise


def abandon_successor(old: Store, folders: Sequence[Path]) -> None:
    """Undo :func:`make_successor`."""
    remove(filter(Path.is_dir, map(successor_folder, folders)))
    reserve(old.directories, old.layout)
    discard_successors(folders)


def promote(new: Sequence[Path], folders: Sequence[Path]) -> list[Path]:
    """Let a committed successor replace the old store; return its directories under their new names, in order.

    Args:
        new: its directories, in order; some may have been renamed before a crash.
        folders: the folders of the old store and of the new one. Both are closed.

    Raises:
        UserError: if a folder holds another store. Nothing was changed.
        StoreError: if a drive refuses. The new store is valid nonetheless; :func:`recover` finishes the change.
    """
    old, identity = [folder for folder in folders if folder.is_dir() and folder not in new], Identity.read(new[0])
    assert identity is not None
    for directory in old:
        other = Identity.read(directory)
        if other is not None and other.store != identity.replaces:
            raise UserError(f"{directory} holds another run than {new[0]}. Give --ssd the directories of one run.")
    try:
        for directory in old:  # before anything else of it: without its manifest it is not the run's
            write_sealed(directory / _MOVED_FILE, {"to": [str(final_folder(path)) for path in new]})
            (directory / MANIFEST_FILE).unlink(missing_ok=True)
            sync_directory(directory)
        for directory in old:
            remove_folder(directory)
        reserve(new, identity.layout)
        named = []
        for directory in new:
            folder = directory
            if directory not in folders:
                folder = final_folder(directory)
                os.rename(directory, folder)
                sync_directory(folder.parent)
            named.append(folder)
    except OSError as error:
        raise describe_os_error("restriping", Path(error.filename or folders[0]), error) from error
    return named


def clear_stale(folders: Sequence[Path], overwrite: bool) -> None:
    """Remove successors that a crash has left next to the folders of a new run.

    Raises:
        UserError: if one is committed, and not to be overwritten.
    """
    if not overwrite:
        for members in _stores([successor_folder(folder) for folder in folders if successor_folder(folder).is_dir()]):
            if any(map(load_manifest, members)):
                raise UserError(
                    f"{members[0]} holds a run already: add --resume to continue it or --overwrite to replace it."
                )
    discard_successors(folders)
    _remove_moved_files(folder for folder in folders if overwrite or not _holds_store(folder))


def _remove_moved_files(directories: Iterable[Path]) -> None:
    for directory in directories:
        (directory / _MOVED_FILE).unlink(missing_ok=True)


def _refuse_remains(folders: Sequence[Path]) -> None:
    """Refuse the remains of a run that has moved: they are no run, nor may a new run overwrite them unawares."""
    for folder in folders:
        moved = read_sealed(folder / _MOVED_FILE)
        if moved is not None:
            raise UserError(
                f"The run in {folder} was moving when it was interrupted, and continues in {', '.join(moved['to'])}. "
                f"Give --ssd the drives that it was moving to; what is left in {folder} can go."
            )


def _find(named: Sequence[Path], empty: Sequence[Path], folders: Sequence[Path]) -> list[Path]:
    try:
        return find_directories(named or empty or folders)[0]
    except UserError as error:
        if not named or not empty:
            raise
        raise UserError(f"{empty[0]} holds no run to continue. {error}") from None


def _existing(folders: Sequence[Path]) -> dict[Path, int]:
    inodes = {}
    for path in (path for folder in folders for path in (folder, successor_folder(folder))):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = path.stat()
            if path.is_dir():
                inodes[path] = status.st_ino
    return inodes


def _holds_store(folder: Path) -> bool:
    return Identity.read(folder) is not None if folder.is_dir() else False


def _stores(directories: Sequence[Path]) -> list[list[Path]]:
    stores: dict[str, list[Path]] = {}
    for directory in directories:
        identity = Identity.read(directory)
        if identity is not None:
            stores.setdefault(identity.store, []).append(directory)
    return list(stores.values())


def _is_committed(members: Sequence[Path]) -> bool:
    try:
        return load_manifest(find_directories(members)[0][0]) is not None
    except UserError:
        return False
    except StoreError:
        if any(map(load_manifest, members)):
            raise
        return False


def _check_space(old: Store, folders: Sequence[Path], layout: Layout, spare: Collection[str]) -> None:
    """Check the space for both stores at once, and for the new one when it has all its files."""
    what = f"to move the run from {len(old.directories)} to {len(folders)} drives"
    new = layout.file_bytes()
    for removed, created in (
        (spare, [name for name in new if name not in spare]),
        (list(old.layout.file_bytes()), list(new)),
    ):
        freed = freed_by(directory / name for directory in old.directories for name in removed)
        check_space(folders, sum(new[name] for name in created), freed, what)
