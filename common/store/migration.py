"""One store takes another's place, on other drives: a crash at any instant leaves one of the two whole.

A store lies in a folder of the same name on each of its drives. Its successor is made in folders beside those, filled,
synced and committed, while the old one stays as it was. The instant of change is the removal of the old manifest: until
then the old store counts, and whatever lies beside it is thrown away after a crash; from then on the new one does, and
after a crash the rest of the old one is removed and the new folders get the old names.

Old files that hold nothing committed give their space back first, and their successors get it at the end: so this needs
no more room than the larger of the two stores, but for files of which there is one copy only.
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
from common.store.manifest import MANIFEST_FILE, load_manifest
from common.store.sealed import read_sealed, sync_directory, write_sealed
from common.store.store import Store
from common.store.throttle import CLOCK_FILE

SCRATCH = "scratch"
"""Folder inside a store's for what does not outlive a run; a store of its own."""
_SUFFIX = ".new"
_MOVED_FILE = "moved.json"
"""In a directory of an old store that no longer counts, until it is removed: where the new one is."""


def successor_folder(folder: Path) -> Path:
    """Where the successor of what lies in ``folder`` is made."""
    return folder.with_name(folder.name + _SUFFIX)


def final_folder(directory: Path) -> Path:
    """The folder that a run has, or will have once it has moved, for one that it has now."""
    return directory.with_name(directory.name.removesuffix(_SUFFIX))


def lock_folders(folders: Sequence[Path]) -> DirectoryLock:
    """Lock all that lies in ``folders`` and beside them.

    Raises:
        UserError: another process has one of them.
        StoreError: one cannot be opened.
    """
    while True:
        there = _there(folders)
        held = DirectoryLock(there)
        if _there(folders) == there:
            return held
        held.close()  # while we waited, another process has put other folders there


def recover(folders: Sequence[Path]) -> list[Path]:
    """Finish or undo what a crash has left half done. Returns the directories of the store that counts, in order.

    Args:
        folders: one for each drive, locked; there may be nothing.

    Raises:
        UserError, StoreError: as :func:`common.store.directories.find_directories`. Nothing was changed.
    """
    named = [folder for folder in folders if _holds_store(folder)]
    new = [successor_folder(folder) for folder in folders if successor_folder(folder).is_dir()]
    if not new:
        whole = [directory for members in _stores(named) if _whole(members) for directory in members]
        _forget_move(whole)
        if not whole:
            _refuse_remains(folders)
        return _find(named, [folder for folder in folders if folder.is_dir() and folder not in named], folders)
    for members in _stores(named):
        if _whole(members):
            ordered, identity = find_directories(named)
            remove(new)  # and only then, there is space to reserve
            reserve(ordered, identity.layout)
            discard_successors(folders)
            _forget_move(ordered)
            return ordered
    candidates = _stores([*named, *new])
    for members in candidates:
        if _whole(members):
            return promote(find_directories(members)[0], folders)
    _refuse_remains(folders)
    # What was committed comes first: it is what the user has to complete.
    best = min(candidates, key=lambda members: not any(map(load_manifest, members)), default=folders)
    return find_directories(best)[0]


def remove_folder(folder: Path, shared: bool = False) -> None:
    """Remove a store's folder, if it is there, with all that we put into it.

    Args:
        shared: other things may be in it; then it stays, without the store.

    Raises:
        StoreError: a drive refused, or there are other things in it.
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
    """A folder that could not be removed in the end would be in the way of its successor.

    Args:
        folders: of stores, of nothing yet, or not there.
        shared: stores in them are no obstacle: they will have gone by then.

    Raises:
        UserError: there is something in one of them that we did not put there.
    """
    for folder in filter(Path.is_dir, folders):
        identity = Identity.read(folder)
        ours = {IDENTITY_FILE, MANIFEST_FILE, _MOVED_FILE, *(identity.layout.file_bytes() if identity else ())}
        ours |= {name + ".tmp" for name in ours} | {CLOCK_FILE, LOCK_FILE, SCRATCH}
        for path in sorted(folder.iterdir()):
            if path.name not in ours and not (shared and _holds_store(path)):
                raise UserError(f"{path} belongs to no run. Move it elsewhere: the run's folder will be made anew.")


def remove_leftovers(store: Store) -> None:
    """Remove what a killed run may have left in a store: scratch, and files that were to replace others."""
    for directory in store.directories:
        remove_folder(directory / SCRATCH)
        for name in store.layout.file_bytes():
            with described("removing", directory / f"{name}.tmp"):
                (directory / f"{name}.tmp").unlink(missing_ok=True)


def discard_successors(folders: Sequence[Path]) -> None:
    """Remove what lies beside ``folders``."""
    for directory in map(successor_folder, folders):
        remove_folder(directory)


def make_successor(old: Store, folders: Sequence[Path], layout: Layout, spare: Collection[str]) -> Store:
    """An empty store beside ``folders``, to be filled and committed; the old one still counts.

    Args:
        old: in folders of the same name; closed, or its spare files keep their space.
        folders: on all drives that the run is to have; they exist or do not.
        spare: files of both stores that hold nothing committed: what is in the old ones is lost, and the new ones have
            no space yet.

    Raises:
        UserError: there is too little space, or a file that belongs to no run. Nothing was changed.
        StoreError: a drive refused; what was made is removed again.
    """
    everywhere, new = (
        list(dict.fromkeys([*old.directories, *folders])),
        [successor_folder(folder) for folder in folders],
    )
    refuse_foreign_files(everywhere)
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
    """Let a committed successor be the run: its directories, under the names they have now, in order.

    Args:
        new: its directories, in order; some may have been renamed before a crash.
        folders: those of the old store and of the new one. Both are closed.

    Raises:
        UserError: a folder holds what is neither of them. Nothing was changed.
        StoreError: a drive refused. The new store counts all the same; calling :func:`recover` goes on.
    """
    old, identity = [folder for folder in folders if folder.is_dir() and folder not in new], Identity.read(new[0])
    assert identity is not None
    for directory in old:
        other = Identity.read(directory)
        if other is not None and other.store != identity.replaces:
            raise UserError(f"{directory} holds another run than {new[0]}. Give --ssd the directories of one run.")
    try:
        for directory in old:  # before anything else of it: without its manifest it does not count
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
    """Remove what a crash has left beside the folders of a new run.

    Raises:
        UserError: it is a run, and not to be overwritten.
    """
    if not overwrite:
        for members in _stores([successor_folder(folder) for folder in folders if successor_folder(folder).is_dir()]):
            if any(map(load_manifest, members)):
                raise UserError(
                    f"{members[0]} holds a run already: add --resume to continue it or --overwrite to replace it."
                )
    discard_successors(folders)
    _forget_move(folder for folder in folders if overwrite or not _holds_store(folder))


def _forget_move(directories: Iterable[Path]) -> None:
    for directory in directories:
        (directory / _MOVED_FILE).unlink(missing_ok=True)


def _refuse_remains(folders: Sequence[Path]) -> None:
    """What is left of a run that has moved is not to be taken for a run, nor to be overwritten in good faith."""
    for folder in folders:
        moved = read_sealed(folder / _MOVED_FILE)
        if moved is not None:
            raise UserError(
                f"The run in {folder} was moving when it was interrupted, and goes on in {', '.join(moved['to'])}. "
                f"Give --ssd the drives that it was moving to; what is left in {folder} can go."
            )


def _find(named: Sequence[Path], empty: Sequence[Path], folders: Sequence[Path]) -> list[Path]:
    """The directories of the only store. Of the folders, some are named for it, and others are there without one."""
    try:
        return find_directories(named or empty or folders)[0]
    except UserError as error:
        if not named or not empty:
            raise
        raise UserError(f"{empty[0]} holds no run to continue. {error}") from None


def _there(folders: Sequence[Path]) -> dict[Path, int]:
    """What is there of the folders and those beside them, and which inode it is."""
    found = {}
    for path in (place for folder in folders for place in (folder, successor_folder(folder))):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = path.stat()
            if path.is_dir():
                found[path] = status.st_ino
    return found


def _holds_store(folder: Path) -> bool:
    return Identity.read(folder) is not None if folder.is_dir() else False


def _stores(directories: Sequence[Path]) -> list[list[Path]]:
    """The directories of each store among them."""
    stores: dict[str, list[Path]] = {}
    for directory in directories:
        identity = Identity.read(directory)
        if identity is not None:
            stores.setdefault(identity.store, []).append(directory)
    return list(stores.values())


def _whole(members: Sequence[Path]) -> bool:
    """Whether these are all directories of a store with something committed in it."""
    try:
        return load_manifest(find_directories(members)[0][0]) is not None
    except UserError:
        return False
    except StoreError:
        if any(map(load_manifest, members)):
            raise
        return False


def _check_space(old: Store, folders: Sequence[Path], layout: Layout, spare: Collection[str]) -> None:
    """Both while the two stores are there, and when the new one has all its space."""
    what = f"to move the run from {len(old.directories)} to {len(folders)} drives"
    new = layout.file_bytes()
    for gone, kept in (
        (spare, [name for name in new if name not in spare]),
        (list(old.layout.file_bytes()), list(new)),
    ):
        freed = freed_by(directory / name for directory in old.directories for name in gone)
        check_space(folders, sum(new[name] for name in kept), freed, what)
