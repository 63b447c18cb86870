"""What may be left after a power cut: everything that a completed sync covers, and any part of the rest.

Data: of the writes that no ``fdatasync`` of their file covers, any subset has reached the drive, and the last of them
perhaps only in part, cut at a sector. Names: the same for files made, renamed and removed, and ``fsync`` of their
directory. That is more than any one file system would lose, and what POSIX allows.
"""

import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.crash.drives import read_journal

SECTOR = 512


@dataclass
class _Change:
    kind: str
    entry: tuple[Any, ...]
    place: int
    done: float = float("inf")
    """Where in the journal it ended; never, if the process was killed before."""
    durable: bool = False


def cut_power(root: Path, notes: Path, seed: int) -> int:
    """Put the files below ``root`` into a state that a power cut may leave. Returns how many changes it lost.

    Once per journal: the journal describes what the files are before. Writes that overlap must have been ordered.
    """
    choose = random.Random(seed)
    share = choose.choice((0.0, 0.5, 0.9))
    lost = [change for change in _changes(notes) if not change.durable]
    for change in reversed(lost):
        _undo(change, root, notes)
    kept = [change for change in lost if choose.random() < share]
    for change in kept:
        sectors = None
        if change.kind == "write" and change is kept[-1]:
            sectors = choose.randrange(len(change.entry[3]) // SECTOR + 1)
        _redo(change, root, notes, sectors)
    return len(lost) - len(kept)


def _changes(notes: Path) -> list[_Change]:
    changes: list[_Change] = []
    by_place: dict[int, _Change] = {}
    syncs: dict[int, tuple[int, int]] = {}
    for place, (kind, *entry) in read_journal(notes):
        if kind == "done":
            begun = entry[0]
            if begun in by_place:
                by_place[begun].done = place
            elif begun in syncs:
                inode, since = syncs[begun]
                for change in changes:
                    if change.done < since:
                        _cover(change, inode)
        elif kind == "sync":
            syncs[place] = entry[0], place
        else:
            by_place[place] = change = _Change(kind, tuple(entry), place)
            changes.append(change)
    return changes


def _cover(change: _Change, inode: int) -> None:
    """A sync of ``inode`` has ended that began after ``change`` was done."""
    if change.kind == "write":
        change.durable = change.durable or change.entry[0] == inode
    else:
        left = [directory for directory in change.entry[3] if directory != inode]
        change.entry = (*change.entry[:3], left)
        change.durable = not left


def _undo(change: _Change, root: Path, notes: Path) -> None:
    if change.kind == "write":
        inode, offset, before, after = change.entry
        path = _find(inode, root, notes)
        if path is not None:
            with open(path, "r+b") as file:
                file.seek(offset)
                file.write(before)
                if len(before) < len(after):
                    file.truncate(offset + len(before))
        return
    path, target, kept, _ = change.entry
    aside = notes / f"undone-{change.place}"
    if change.kind in ("create", "recreate", "mkdir") and os.path.lexists(path):
        os.rename(path, aside)
        if kept is not None:
            os.link(kept, path)
    elif change.kind == "rmdir" and not os.path.lexists(path):
        os.mkdir(path)
    elif change.kind == "unlink" and not os.path.lexists(path) and Path(path).parent.is_dir():
        os.link(kept, path)  # else its directory is gone for good
    elif change.kind == "rename" and not os.path.lexists(path) and os.path.lexists(target):
        os.rename(target, path)
        if kept is not None:
            os.link(kept, target)


def _redo(change: _Change, root: Path, notes: Path, sectors: int | None) -> None:
    if change.kind == "write":
        inode, offset, _, after = change.entry
        path = _find(inode, root, notes)
        if path is not None:
            with open(path, "r+b") as file:
                file.seek(offset)
                file.write(after if sectors is None else after[: sectors * SECTOR])
        return
    path, target, _, _ = change.entry
    aside = notes / f"undone-{change.place}"
    if not Path(path).parent.is_dir():
        return  # its directory was lost
    if change.kind in ("create", "recreate", "mkdir") and aside.exists():
        os.replace(aside, path)
    elif change.kind == "unlink" and os.path.lexists(path):
        os.unlink(path)
    elif change.kind == "rename" and os.path.lexists(path):
        os.replace(path, target)
    elif change.kind == "rmdir" and os.path.isdir(path) and not os.listdir(path):
        os.rmdir(path)


def _find(inode: int, *places: Path) -> Path | None:
    for place in places:
        for path in place.rglob("*"):
            if path.is_file() and path.stat().st_ino == inode:
                return path
    return None
