"""Drives that fail on command, and remember what a power cut would make them forget.

``FaultyDrives.install`` puts itself between this process (and what it forks) and the operating system: every call that
reads or changes something below ``root`` is counted, over all threads and processes, and the chosen one fails. Nothing
in the product knows of it: it calls ``os.pwritev``, ``os.fdatasync``, ``os.replace`` and the like, and these are here.

With a journal, what every call did is written down before and after it: enough for :mod:`tests.helpers.crash.power` to
work out which states the drives may be in after a power cut.
"""

import contextlib
import errno
import os
import pickle
import signal
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LENGTH = struct.Struct("<I")
_PAGE = 4096

#: What a call does, by its name in ``os``.
KINDS = {
    "preadv": "read", "pwritev": "write", "write": "write", "fdatasync": "sync", "fsync": "sync",
    "posix_fallocate": "allocate", "replace": "rename", "rename": "rename", "unlink": "unlink", "mkdir": "mkdir",
    "rmdir": "rmdir", "open": "create",
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and when."""

    at: int
    """At the call of this number, from 1."""
    action: str = "kill all"
    """``kill all`` (engine and optimizer process), ``kill self`` (the one that makes the call), ``tear`` (half of a
    write, then ``kill all``), ``eio``, ``enospc``, or ``short`` (half of what was requested)."""
    kind: str = "any"
    """Only calls of this kind are counted: a value of :data:`KINDS`."""
    forever: bool = False
    """All later calls of the kind fail also: a full or dead drive stays one."""


class FaultyDrives:
    """The calls of this process and its children below ``root``.

    Args:
        root: what lies elsewhere is not counted.
        notes: a directory on the same file system, outside ``root``, for counters and journal.
        fault: what goes wrong; None: nothing.
        journal: whether to write down what every call changes.
    """

    def __init__(self, root: Path, notes: Path, fault: Fault | None, journal: bool):
        self._root, self._notes, self._fault, self._journal = str(root) + os.sep, notes, fault, journal
        self._own = threading.local()
        self._real = {name: getattr(os, name) for name in KINDS}
        notes.mkdir(exist_ok=True)

    def install(self) -> None:
        """Take the place of the calls, for good: for processes that end soon."""
        for name in KINDS:
            setattr(os, name, getattr(self, f"_{name}"))

    # -- calls ----------------------------------------------------------------------------------------------------

    def _preadv(self, descriptor: int, buffers: list[Any], offset: int) -> int:
        path = self._path_of(descriptor)
        if path is None:
            return self._real["preadv"](descriptor, buffers, offset)
        if self._happens("read") == "short" and len(buffers[0]) > _PAGE:
            return self._real["preadv"](descriptor, [buffers[0][: len(buffers[0]) // 2]], offset)
        return self._real["preadv"](descriptor, buffers, offset)

    def _pwritev(self, descriptor: int, buffers: list[Any], offset: int) -> int:
        path = self._path_of(descriptor)
        if path is None:
            return self._real["pwritev"](descriptor, buffers, offset)
        fate, view = self._happens("write"), memoryview(buffers[0])
        if fate == "tear":
            view = view[: max(512, len(view) // 2 // 512 * 512)]
        elif fate == "short":  # whole pages: a file system that is not full stops nowhere else
            view = view[: max(_PAGE, len(view) // 2 // _PAGE * _PAGE)]
        with self._noted("write", descriptor, offset, view):
            if fate == "tear":  # sectors, not pages: direct I/O could not, and the drive does it alone
                with open(path, "r+b", buffering=0) as file:
                    file.seek(offset)
                    file.write(view)
                self._kill_all()
            return self._real["pwritev"](descriptor, [view], offset)

    def _write(self, descriptor: int, data: Any) -> int:
        path = self._path_of(descriptor)
        if path is None:
            return self._real["write"](descriptor, data)
        fate, view = self._happens("write"), memoryview(data)
        if fate in ("short", "tear"):
            view = view[: max(1, len(view) // 2)]
        with self._noted("write", descriptor, os.lseek(descriptor, 0, os.SEEK_CUR), view):
            done = self._real["write"](descriptor, view)
            if fate == "tear":
                self._kill_all()
            return done

    def _fdatasync(self, descriptor: int) -> None:
        self._sync("fdatasync", descriptor)

    def _fsync(self, descriptor: int) -> None:
        self._sync("fsync", descriptor)

    def _sync(self, name: str, descriptor: int) -> None:
        if self._path_of(descriptor) is None:
            return self._real[name](descriptor)
        self._happens("sync")
        with self._noted("sync", descriptor):
            return self._real[name](descriptor)

    def _posix_fallocate(self, descriptor: int, offset: int, nbytes: int) -> None:
        if self._path_of(descriptor) is not None:
            self._happens("allocate")
        return self._real["posix_fallocate"](descriptor, offset, nbytes)

    def _open(self, path: Any, flags: int, mode: int = 0o777, **others: Any) -> int:
        if not flags & os.O_CREAT or not self._counts(path):
            return self._real["open"](path, flags, mode, **others)
        self._happens("create")
        name = Path(os.fspath(path))
        if not name.exists():
            with self._named("create", name):
                return self._real["open"](path, flags, mode, **others)
        if flags & os.O_TRUNC:
            # Losing a truncation, or what came after it, is losing a new file that took an old one's place.
            with self._named("recreate", name, kept=self._keep(name)):
                self._real["unlink"](path)
                return self._real["open"](path, flags, mode, **others)
        return self._real["open"](path, flags, mode, **others)

    def _replace(self, source: Any, target: Any, **others: Any) -> None:
        return self._rename(source, target, **others)

    def _rename(self, source: Any, target: Any, **others: Any) -> None:
        if not self._counts(target):
            return self._real["replace"](source, target, **others)
        self._happens("rename")
        with self._named("rename", Path(source), target=Path(target), kept=self._keep(Path(target))):
            return self._real["replace"](source, target, **others)

    def _unlink(self, path: Any, **others: Any) -> None:
        if not self._counts(path) or not os.path.lexists(path):
            return self._real["unlink"](path, **others)
        self._happens("unlink")
        with self._named("unlink", Path(path), kept=self._keep(Path(path))):
            return self._real["unlink"](path, **others)

    def _mkdir(self, path: Any, mode: int = 0o777, **others: Any) -> None:
        if not self._counts(path):
            return self._real["mkdir"](path, mode, **others)
        self._happens("mkdir")
        with self._named("mkdir", Path(path)):
            return self._real["mkdir"](path, mode, **others)

    def _rmdir(self, path: Any, **others: Any) -> None:
        if not self._counts(path):
            return self._real["rmdir"](path, **others)
        self._happens("rmdir")
        with self._named("rmdir", Path(path)):
            return self._real["rmdir"](path, **others)

    # -- faults ---------------------------------------------------------------------------------------------------

    def _happens(self, kind: str) -> str:
        """Count a call; return, or do, what happens to it."""
        fault = self._fault
        if fault is not None and fault.kind not in ("any", kind):
            return ""
        number = self._append("count", b".")
        if fault is None or number < fault.at or (number > fault.at and not fault.forever):
            return ""
        if fault.action == "kill all" or (fault.action == "tear" and kind != "write"):
            self._kill_all()
        elif fault.action == "kill self":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.action in ("eio", "enospc"):
            code = errno.EIO if fault.action == "eio" else errno.ENOSPC
            raise OSError(code, os.strerror(code))
        return fault.action

    @staticmethod
    def _kill_all() -> None:
        os.killpg(0, signal.SIGKILL)

    # -- notes ----------------------------------------------------------------------------------------------------

    def _append(self, name: str, data: bytes) -> int:
        """Append to a file of notes, all of it at once; returns where it ends. Every thread has its own description
        of the file, so that the place after a write is that write's own."""
        try:
            descriptors = self._own.descriptors
            assert self._own.pid == os.getpid()
        except (AttributeError, AssertionError):
            descriptors = self._own.descriptors = {}
            self._own.pid = os.getpid()
        if name not in descriptors:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            descriptors[name] = self._real["open"](self._notes / name, flags, 0o666)
        assert self._real["write"](descriptors[name], data) == len(data)
        return os.lseek(descriptors[name], 0, os.SEEK_CUR)

    def _note(self, *entry: Any) -> int:
        data = pickle.dumps(entry)
        return self._append("journal", _LENGTH.pack(len(data)) + data)

    @contextlib.contextmanager
    def _noted(self, kind: str, descriptor: int, offset: int = 0, data: Any = b"") -> Iterator[None]:
        """Write down a write or a sync, with what was there before."""
        if not self._journal:
            yield
            return
        inode, before = os.fstat(descriptor).st_ino, b""
        if kind == "write":
            with open(f"/proc/self/fd/{descriptor}", "rb", buffering=0) as file:
                file.seek(offset)
                before = file.read(len(data))
        place = self._note(kind, inode, offset, before, bytes(data))
        yield
        self._note("done", place)

    @contextlib.contextmanager
    def _named(
        self, kind: str, path: Path, target: Path | None = None, kept: str | None = None
    ) -> Iterator[None]:
        """Write down a change of a directory."""
        if not self._journal:
            yield
            return
        directories = {os.stat(name.parent).st_ino for name in (path, target) if name is not None}
        place = self._note(kind, str(path), str(target), kept, sorted(directories))
        yield
        self._note("done", place)

    def _keep(self, path: Path) -> str | None:
        """A second name for a file that is about to lose its first."""
        if not self._journal or not path.exists():
            return None
        kept = str(self._notes / f"kept-{self._append('names', b'.')}")
        os.link(path, kept)
        return kept

    # -- which ----------------------------------------------------------------------------------------------------

    def _counts(self, path: Any) -> bool:
        return isinstance(path, (str, os.PathLike)) and os.path.abspath(path).startswith(self._root)

    def _path_of(self, descriptor: int) -> str | None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        return path if (path + os.sep).startswith(self._root) else None


def read_journal(notes: Path) -> list[tuple[int, tuple[Any, ...]]]:
    """The entries of a journal, each with its place; the last one may have been cut off."""
    file = notes / "journal"
    data, at, entries = file.read_bytes() if file.exists() else b"", 0, []
    while at + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size + length
        if at <= len(data):
            entries.append((at, pickle.loads(data[at - length : at])))
    return entries


def count(notes: Path) -> int:
    """How many calls were counted."""
    file = notes / "count"
    return file.stat().st_size if file.exists() else 0
