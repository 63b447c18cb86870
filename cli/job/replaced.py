"""What a new run sets aside of an earlier one in an output directory: put back if the new run fails before it has a
commit, else removed. A journal next to the files says which they are.
"""

import contextlib
import hashlib
import json
import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cli.options.run_record import (
    COMMITS,
    OUTPUT,
    REPLACED,
    RunRecord,
    StorePlace,
    read_description,
    read_json,
)
from common.errors import FinetuneError, UserError, as_message
from common.files import TEMPORARY_SUFFIX, make_directory, replace_file, sync
from common.store.directories import IDENTITY_FILE, DirectoryLock
from common.store.errors import described
from common.store.folders import rank_folder, remove_folder, successor_folder
from common.store.manifest import MANIFEST_FILE

# File in the folder of what was set aside: its files, who replaces it, how the stores were
JOURNAL = "journal.json"
_IS_OVER = "is_over"  # Key in the journal, once the files are to be removed, and not to be put back any more
# Keys of the earlier run's directories, and of whether this output began them
_PLACES = "places"
_IS_OURS = "is_ours"


def has_journal(directory: Path) -> bool:
    """Return whether files of an earlier run were set aside in an output directory."""
    return (directory / REPLACED / JOURNAL).exists()


def is_to_be_put_back(directory: Path) -> bool:
    """Return whether files were set aside that are not being removed."""
    return has_journal(directory) and not _read(directory).get(_IS_OVER)


def check_put_back(directory: Path) -> None:
    """Refuse to read an output directory whose files are set aside.

    Raises:
        UserError: says where they are, and what puts them back.
    """
    check_journal(directory)
    if is_to_be_put_back(directory):
        again = f"--output {shlex.quote(str(directory))}"
        raise UserError(
            f"A run that was to replace what is in {directory} is at work, or was killed: what it has set aside is in "
            f"{directory / REPLACED}. The next finetune train or export with {again} puts it back."
        )


def check_journal(directory: Path) -> None:
    """Refuse a directory in which nothing tells any more what was set aside."""
    if has_journal(directory) and not _read(directory):
        folder = directory / REPLACED
        raise UserError(
            f"{folder / JOURNAL} is damaged, which lists what a killed run has set aside in {folder}: move these files "
            f"back into {directory}, or elsewhere, and remove {folder}."
        )


def was_set_aside_by(directory: Path, id: str) -> bool:
    """Return whether the run with this id has set aside what there is."""
    return _read(directory).get("by") == id


def are_stores_as_they_were(directory: Path) -> bool:
    """Return whether the earlier run's stores are as they were when its files were set aside."""
    journal = _read(directory)
    return bool(journal) and _states_of_stores(directory, journal["stores"]) == journal["states"]


def set_aside(directory: Path, files: Sequence[str], by: str, stores: Iterable[Path]) -> None:
    """Set aside these files of an output directory for the run with the id ``by``.

    Where something was set aside before, by a run that was killed, these are that run's, which had no commit: they are
    removed with the others.

    Args:
        stores: folders of the new run's stores, in which the earlier run's may be.
    """
    folder = directory / REPLACED
    with described("setting aside", directory):
        if has_journal(directory) and not is_to_be_put_back(directory):
            remove_replaced(directory)
        journal = _read(directory)
        if not journal:
            for file in files:
                if os.path.lexists(folder / file):
                    raise UserError(f"{folder / file} was not set aside by a run: move it out of {folder}.")
            names = [_inside(directory, store) for store in stores]
            states = _states_of_stores(directory, names)
            journal = {"by": by, "stores": names, "states": states, "files": [], _PLACES: []}
        journal["files"] = list(dict.fromkeys([*journal["files"], *files]))
        record = RunRecord.read(directory)
        origin = read_description(directory).get(OUTPUT)
        is_ours = origin == str(directory.resolve())  # else this is a copy of another
        for store in () if record is None else record.places:
            journal[_PLACES].append({**asdict(store), _IS_OURS: is_ours, OUTPUT: origin})
        make_directory(folder)
        _write(directory, journal)
        # The list of the earlier run: while it is there, so is what says whose the others are
        *others, last = files
        move(directory, folder, others)
        move(directory, folder, [last])


def put_back(directory: Path) -> None:
    """Put back what was set aside. Killed at any moment, it can be done again."""
    folder = directory / REPLACED
    journal = _read(directory)
    move(folder, directory, sorted(file for file in journal["files"] if os.path.lexists(folder / file)))
    _write(directory, {**journal, _IS_OVER: True, _PLACES: []})
    remove_replaced(directory)


def remove_replaced(directory: Path) -> None:
    """Remove the earlier run's stores that are not replaced in their places, the files that the journal lists, then the
    journal, and the folder unless there are others in it.

    Killed at any moment, it can be done again: from its start, the journal says that nothing is to be put back.
    """
    folder = directory / REPLACED
    if not folder.is_dir():
        return
    with described("removing", folder):
        if journal := _read(directory):
            _write(directory, {**journal, _IS_OVER: True})
            _remove_stores(journal)
            for file in journal["files"]:
                (folder / file).unlink(missing_ok=True)
            # Before their folders are removed, which cannot be synced then
            sync_folders(folder, journal["files"])
            inner = {folder / parent for file in journal["files"] for parent in Path(file).parents[:-1]}
            for empty in sorted(inner, key=lambda path: len(path.parts), reverse=True):
                with contextlib.suppress(OSError):  # not empty, or removed before
                    empty.rmdir()
                    sync(empty.parent)
            (folder / JOURNAL).unlink()
        (folder / f"{JOURNAL}{TEMPORARY_SUFFIX}").unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()
        sync(directory)


def _remove_stores(journal: dict[str, Any]) -> None:
    """Remove the earlier run's stores that are still there: on other drives, or under another name. Name what stays."""
    for content in journal.get(_PLACES, ()):
        path = Path(content["path"])
        if not StorePlace(content["path"], content["store"], content["index"]).is_there():
            continue
        why = "which was begun in another output"
        origin = Path(content.get(OUTPUT) or path)
        record = None if content[_IS_OURS] else RunRecord.read(origin)
        if record is not None and any(directory.store == content["store"] for directory in record.places):
            print(
                f"kept     {path}: the store of the run in {origin}, of which this output was a copy",
                flush=True,
            )
            continue
        if content[_IS_OURS]:
            try:
                _remove_store(path)
            except FinetuneError as error:
                why = f"which could not be removed ({as_message(str(error))})"
            else:
                print(f"removed  {path}: the store of the run that was replaced", flush=True)
                continue
        print(
            f"kept     {path}: the store of the run that was replaced, {why}. If no other output needs it: "
            f"rm -r {shlex.quote(str(path))}",
            flush=True,
        )


def _remove_store(path: Path) -> None:
    if path.name == COMMITS:
        from fcdp.checkpoint import ShardedCheckpoints  # which takes long to import

        ShardedCheckpoints(path).remove()
        return
    with DirectoryLock([path], patience=0):
        remove_folder(path, shared=True)
    if path.name.startswith(rank_folder("")):
        with contextlib.suppress(OSError):  # not empty
            path.parent.rmdir()


def _read(directory: Path) -> dict[str, Any]:
    journal = read_json(directory / REPLACED / JOURNAL)
    return journal if isinstance(journal.get("files"), list) else {}


def _write(directory: Path, journal: dict[str, Any]) -> None:
    replace_file(directory / REPLACED / JOURNAL, json.dumps(journal, indent=1) + "\n")


def _inside(directory: Path, path: Path) -> str:
    """Return a path as seen from an output directory, if it is in that: it stays true when that is moved."""
    return str(path.relative_to(directory) if path.is_relative_to(directory) else path.absolute())


def _states_of_stores(directory: Path, stores: Iterable[str]) -> dict[str, str]:
    """Return a hash of each manifest and identity of the stores in these folders, by its path."""
    folders = [
        folder for store in stores for folder in (directory / store, successor_folder(directory / store))
    ]
    # Of ranks, too
    patterns = [f"{inner}{name}" for name in (MANIFEST_FILE, IDENTITY_FILE) for inner in ("", "*/")]
    files = [file for folder in folders for pattern in patterns for file in folder.glob(pattern)]
    return {_inside(directory, file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def move(source: Path, target: Path, files: Iterable[str]) -> None:
    """Move files from one directory to another, durably, with the folders that they are in."""
    for file in files:
        make_directory((target / file).parent)
        os.replace(source / file, target / file)
        remove_empty_folders(source, file)
    sync_folders(target, files)
    sync_folders(source, files)


def remove_empty_folders(directory: Path, file: str) -> None:
    """Remove the folders inside a directory that a file was in, unless there is more in them."""
    for parent in Path(file).parents[:-1]:
        with contextlib.suppress(OSError):  # not empty
            (directory / parent).rmdir()


def sync_folders(directory: Path, files: Iterable[str]) -> None:
    """Make it durable which of these files are in a directory, and in the folders in it."""
    for folder in {directory / parent for file in files for parent in Path(file).parents}:
        if folder.is_dir():
            sync(folder)
