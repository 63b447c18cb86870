"""The changes that a command made to files, in order, and what of them a kill or a power cut may leave.

Data: what no sync of the file covers may be lost, wholly or in part. Names (files created, renamed, removed; lengths
that were cut): the same, and a sync of the directory. That is what POSIX allows; no file system loses more.
"""

import contextlib
import copy
import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

SECTOR = 512
NEVER = 1 << 60

#: What a crash leaves of the changes that no sync covers.
KILLED, NAMES, NOTHING, TORN, ANY = "all", "names only", "nothing", "data in part", "any part"
ENDINGS = (KILLED, NAMES, NOTHING, TORN, ANY)
_DATA = ("write", "allocate")


@dataclass(frozen=True)
class Change:
    """One call; files and directories are given by number."""

    kind: str
    node: int
    entries: tuple[tuple[int, str], ...] = ()
    """Directory and name: where the node appears (``create``, ``mkdir``) or disappears (``unlink``, ``rmdir``), and for
    ``rename`` first where it was, then where it will be."""
    offset: int = 0
    data: bytes = b""
    path: Path = Path()
    """What it was about, relative to the root; of a rename, the new name."""


@dataclass(frozen=True)
class File:
    """A file or directory after a crash."""

    node: int
    data: bytes | None
    """None: a directory."""
    changed: int | None = None
    """Time of its last change in nanoseconds, if known."""
    is_link: bool = False
    """Whether it is a symbolic link, and the data are where it leads."""


State = dict[Path, File]


class Tree:
    """Files and directories by number; the root's is 0."""

    def __init__(self) -> None:
        self.names: dict[int, dict[str, int]] = {0: {}}
        self.data: dict[int, bytearray] = {}
        self.times: dict[int, int] = {}
        self.links = set[int]()

    def find(self, path: Path) -> int | None:
        node = 0
        for name in path.parts:
            node = self.names.get(node, {}).get(name, -1)
        return None if node < 0 else node

    def apply(self, change: Change, data: bytes) -> None:
        """Take place, with ``data`` in place of the change's."""
        kind, node = change.kind, change.node
        if kind == "rmdir" and self.names.get(node):
            return  # what was in it is not gone
        if kind == "mkdir":
            self.names.setdefault(node, {})
        elif kind == "symlink":
            self.data[node] = bytearray(data)
            self.links.add(node)
        elif kind in ("create", *_DATA, "truncate"):
            content = self.data.setdefault(node, bytearray())
            if kind == "truncate":
                content[change.offset :] = bytes(max(0, change.offset - len(content)))
            elif kind == "allocate":
                content.extend(bytes(max(0, change.offset - len(content))))
            elif kind == "write":
                content.extend(bytes(max(0, change.offset - len(content))))
                content[change.offset : change.offset + len(data)] = data
        gone = {"unlink": 1, "rmdir": 1, "rename": 1}.get(kind, 0)
        for folder, name in change.entries[:gone]:
            if self.names.get(folder, {}).get(name) == node:
                del self.names[folder][name]
        for folder, name in change.entries[gone:]:
            self.names.setdefault(folder, {})[name] = node

    def walk(self, node: int = 0, path: Path = Path()) -> Iterator[tuple[Path, int]]:
        for name, child in sorted(self.names[node].items()):
            yield path / name, child
            if child in self.names:
                yield from self.walk(child, path / name)


class Journal:
    """All changes below ``root``, which begins as it is now, with nothing of it unsynced."""

    def __init__(self, root: Path):
        self.root, self.changes = root, list[Change]()
        self._times: dict[int, int] = {}
        self._unsettled: dict[int, int] = {}
        self._lock = threading.Lock()
        self._live, self._next = Tree(), 1
        for path in sorted(root.rglob("*")):
            kind = "symlink" if path.is_symlink() else "mkdir" if path.is_dir() else "create"
            node = self._add(self._live, kind, path.relative_to(root))
            if kind != "mkdir":
                self._live.data[node] = bytearray(_read(path))
                self._live.times[node] = path.lstat().st_mtime_ns
        self.first = copy.deepcopy(self._live)
        """What was there before."""
        self.old = frozenset(range(self._next))
        """Numbers of what was there before."""

    def _add(self, tree: Tree, kind: str, path: Path) -> int:
        parent, self._next = tree.find(path.parent), self._next + 1
        assert parent is not None
        tree.apply(Change(kind, self._next - 1, ((parent, path.name),)), b"")
        return self._next - 1

    # -- recording ----------------------------------------------------------------------------------------------------

    def note(self, thread: int, kind: str, path: Path | None, *others: Any) -> None:
        """Note what a thread asks the kernel to change (:func:`tests.helpers.crash.syscalls.record`)."""
        inside = [each for each in (path, *others) if isinstance(each, Path) and self._is_inside(each)]
        if not inside:
            return
        with self._lock:
            self._settle(thread)
            assert len(inside) == (2 if kind in ("rename", "link") else 1), (
                f"{kind} across the root: {path} {others}"
            )
            names = [each.relative_to(self.root) for each in inside]
            for change in getattr(self, f"_{kind}")(
                *names, *(each for each in others if not isinstance(each, Path))
            ):
                self._live.apply(change, change.data)
                self.changes.append(change)
                self._unsettled[thread] = len(self.changes) - 1

    def _settle(self, thread: int) -> None:
        """Note the time of the last change by a thread, which is done now."""
        number = self._unsettled.pop(thread, None)
        if number is not None and self.changes[number].node in self._live.data:
            with contextlib.suppress(OSError):
                self._times[number] = (self.root / self.changes[number].path).lstat().st_mtime_ns

    def _is_inside(self, path: Path) -> bool:
        return path.is_relative_to(self.root)

    def _entry(self, path: Path) -> tuple[int, str]:
        parent = self._live.find(path.parent)
        return (-1 if parent is None else parent), path.name

    def _new(self, kind: str, path: Path) -> Iterator[Change]:
        folder, name = self._entry(path)
        if folder >= 0:
            self._next += 1
            yield Change(kind, self._next - 1, ((folder, name),), path=path)

    def _open(self, path: Path, creates: bool, truncates: bool) -> Iterator[Change]:
        node = self._live.find(path)
        if node is None and creates:
            yield from self._new("create", path)
        elif node is not None and truncates and self._live.data.get(node):
            yield Change("truncate", node, path=path)

    def _write(self, path: Path, offset: int, data: bytes) -> Iterator[Change]:
        node = self._live.find(path)
        if node is None:
            assert path.name.endswith(" (deleted)"), f"a write to {path}, which was never created"
            return
        yield Change("write", node, (), len(self._live.data[node]) if offset < 0 else offset, data, path)

    def _truncate(self, path: Path, size: int) -> Iterator[Change]:
        node = self._live.find(path)
        if node is not None and len(self._live.data[node]) != size:
            yield Change("truncate", node, (), size, path=path)

    def _allocate(self, path: Path, size: int) -> Iterator[Change]:
        node = self._live.find(path)
        if node is not None and len(self._live.data[node]) < size:
            yield Change("allocate", node, (), size, path=path)

    def _sync(self, path: Path) -> Iterator[Change]:
        node = self._live.find(path)
        if node is not None:
            yield Change("sync", node, path=path)

    def _touch(self, path: Path) -> Iterator[Change]:
        node = self._live.find(path)
        if node is not None:
            yield Change("touch", node, path=path)

    def _rename(self, source: Path, target: Path) -> Iterator[Change]:
        node = self._live.find(source)
        if node is not None:
            yield Change("rename", node, (self._entry(source), self._entry(target)), path=target)

    def _link(self, source: Path, target: Path) -> Iterator[Change]:
        node = self._live.find(source)
        if node is not None and self._live.find(target) is None:
            yield Change("create", node, (self._entry(target),), path=target)

    def _symlink(self, path: Path, target: bytes) -> Iterator[Change]:
        if self._live.find(path) is None:
            for change in self._new("symlink", path):
                yield replace(change, data=target)

    def _unlink(self, path: Path) -> Iterator[Change]:
        node = self._live.find(path)
        if node is not None and node in self._live.data:
            yield Change("unlink", node, (self._entry(path),), path=path)

    def _mkdir(self, path: Path) -> Iterator[Change]:
        if self._live.find(path) is None:
            yield from self._new("mkdir", path)

    def _rmdir(self, path: Path) -> Iterator[Change]:
        node = self._live.find(path)
        if node is not None and not self._live.names.get(node, "not a directory"):
            yield Change("rmdir", node, (self._entry(path),), path=path)

    # -- what was recorded --------------------------------------------------------------------------------------------

    def check_complete(self) -> None:
        """Raise unless the changes explain what is there now: nothing was missed. For when all has ended."""
        for thread in list(self._unsettled):
            self._settle(thread)
        there = {path.relative_to(self.root): path for path in sorted(self.root.rglob("*"))}
        explained = dict(self._live.walk())
        assert explained.keys() == there.keys(), explained.keys() ^ there.keys()
        for path, node in explained.items():
            if node in self._live.data:
                assert self._live.data[node] == _read(there[path]), f"{path} was changed by an unknown call"

    def replayed(self) -> Iterator[tuple[Tree, Change | None]]:
        """Return each change, with what is there before it; None after the last one."""
        tree = copy.deepcopy(self.first)
        for change in self.changes:
            yield tree, change
            tree.apply(change, change.data)
        yield tree, None

    def covered(self) -> list[int]:
        """Return for each change the number of the sync that makes it last."""
        last, waits = [NEVER] * len(self.changes), dict[int, set[int]]()
        for number, change in enumerate(self.changes):
            if change.kind == "sync":
                for other, nodes in list(waits.items()):
                    nodes.discard(change.node)
                    if not nodes:
                        last[other] = number
                        del waits[other]
            else:
                # File systems journal both names of a rename together.
                waits[number] = {folder for folder, _ in change.entries[-1:]} or {change.node}
        return last

    def state(
        self, number: int, ending: str, covered: list[int], skips: Callable[[Change], bool] | None = None
    ) -> State:
        """Return what there is if all ends before the change of this number, from 0.

        Args:
            ending: one of :data:`ENDINGS`.
            covered: as :meth:`covered` returns it.
            skips: changes that are left out, to be faster.
        """
        tree = copy.deepcopy(self.first)
        for change in self.changes[:number]:  # a name may outlive the call that has made what it names
            if change.kind == "mkdir":
                tree.names[change.node] = {}
            elif change.kind == "symlink":
                tree.apply(replace(change, entries=()), change.data)
            elif change.kind == "create":
                tree.data.setdefault(change.node, bytearray())
        draw = random.Random(number)
        share = draw.choice((0.2, 0.5, 0.8))
        torn = set[int]()
        for at, change in enumerate(self.changes[:number]):
            if skips is not None and skips(change):
                continue
            data, is_data = change.data, change.kind in _DATA
            if covered[at] >= number and ending != KILLED:
                if (
                    ending == NOTHING
                    or (ending == NAMES and is_data)
                    or (ending == ANY and draw.random() > share)
                ):
                    continue
                if ending == TORN and is_data:
                    if change.node in torn:
                        continue
                    if draw.random() < 0.5:
                        torn.add(change.node)
                        data = _part(data, draw)
            tree.apply(change, data)
            if at in self._times:
                tree.times[change.node] = self._times[at]
        return {
            path: File(node, _content(tree, node), tree.times.get(node), node in tree.links)
            for path, node in tree.walk()
        }


def _read(path: Path) -> bytes:
    return os.fsencode(os.readlink(path)) if path.is_symlink() else path.read_bytes()


def _content(tree: Tree, node: int) -> bytes | None:
    return bytes(tree.data[node]) if node in tree.data else None


def _part(data: bytes, draw: random.Random) -> bytes:
    """Return the beginning of data, whole sectors if it has some."""
    if len(data) <= SECTOR:
        return data[: draw.randrange(len(data))] if data else data
    return data[: draw.randrange(len(data) // SECTOR + 1) * SECTOR]


def write_state(state: State, root: Path) -> None:
    """Write files and directories into ``root``, which is empty."""
    for path, file in state.items():
        if file.data is None:
            (root / path).mkdir(parents=True)
        elif file.is_link:
            (root / path).symlink_to(os.fsdecode(file.data))
        else:
            (root / path).write_bytes(file.data)
        if file.data is not None and file.changed is not None:
            os.utime(root / path, ns=(file.changed, file.changed), follow_symlinks=False)
