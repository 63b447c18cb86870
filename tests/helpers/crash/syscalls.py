"""Record every change that a process and its children make to files, in the order in which they ask the kernel for it.

The kernel stops each call that may change a file (seccomp, user notification) until this process has read its
arguments. So what Rust, C++, and other programs write is seen too, without root and without a compiler; and that
nothing was missed is checked at the end (:meth:`tests.helpers.crash.journal.Journal.tree`).
"""

import ctypes
import errno
import fcntl
import os
import platform
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.helpers.processes import forked

#: Number of each call on x86-64 (None: absent) and on 64-bit Arm, and what is done when it comes.
_CALLS: dict[str, tuple[int | None, int | None, str]] = {
    "write": (1, 64, "write"), "pwrite64": (18, 68, "write"), "writev": (20, 66, "write"),
    "pwritev": (296, 70, "write"), "pwritev2": (328, 287, "write"), "open": (2, None, "open"),
    "creat": (85, None, "refuse"), "openat": (257, 56, "open"), "openat2": (437, 437, "refuse"),
    "truncate": (76, 45, "refuse"), "ftruncate": (77, 46, "truncate"), "fallocate": (285, 47, "allocate"),
    "fsync": (74, 82, "sync"), "fdatasync": (75, 83, "sync"), "rename": (82, None, "rename"),
    "renameat": (264, 38, "rename"), "renameat2": (316, 276, "rename"), "unlink": (87, None, "unlink"),
    "unlinkat": (263, 35, "unlink"), "mkdir": (83, None, "mkdir"), "mkdirat": (258, 34, "mkdir"),
    "rmdir": (84, None, "rmdir"), "link": (86, None, "link"), "linkat": (265, 37, "link"),
    "symlink": (88, None, "symlink"), "symlinkat": (266, 36, "symlink"), "utimensat": (280, 88, "touch"),
    # Callers then copy with read and write, or fail.
    "sendfile": (40, 71, "refuse"), "copy_file_range": (326, 285, "refuse"), "io_uring_setup": (425, 425, "refuse"),
}  # fmt: skip
_ARCHITECTURES = {"x86_64": (0, 0xC000003E, 317), "aarch64": (1, 0xC00000B7, 277)}
_column, _audit, _SECCOMP = _ARCHITECTURES.get(platform.machine(), (0, 0, 0))
_NUMBERS = {numbers[_column]: name for name, numbers in _CALLS.items() if numbers[_column] is not None}

_NOTIFICATION, _ANSWER, _INSTRUCTION = (
    struct.Struct("<QIIiIQ6Q"),
    struct.Struct("<QqiI"),
    struct.Struct("<HBBI"),
)
_RECEIVE, _SEND, _CONTINUE = 0xC0502100, 0xC0182101, 1
_NEW_LISTENER, _WAIT_KILLABLE = 1 << 3, 1 << 5
_LOAD, _JUMP_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x45, 0x06
_NOTIFY, _ALLOW = 0x7FC00000, 0x7FFF0000
_AT_FDCWD, _PAGE = -100, 4096
_MEANT = os.O_CREAT | os.O_TRUNC  # an `open` without these changes nothing

Note = Callable[..., None]
"""Called with thread, kind of change, and what belongs to it (:meth:`tests.helpers.crash.journal.Journal.note`)."""


def is_available() -> bool:
    """Return whether this kernel stops calls for us."""
    if platform.machine() not in _ARCHITECTURES:
        return False
    child = os.fork()
    if not child:
        try:
            _listener()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def record(words: Sequence[str], note: Note, *, timeout: float = 120.0, **options: Any) -> tuple[int, str]:
    """Run Python with ``words``, forked, and note each change; return exit status and output.

    Args:
        words: as for :class:`tests.helpers.processes.forked.Popen`, without the interpreter.
        note: called by another thread.
        options: of ``subprocess.Popen``.
    """
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            args = [sys.executable, "-m", __name__, str(theirs.fileno()), *words]
            process = forked.Popen(
                args, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                pass_fds=[theirs.fileno()], start_new_session=True, **options,
            )  # fmt: skip
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    assert descriptors, process.communicate()[0]
    (listener,) = descriptors
    failures: list[BaseException] = []
    watch = threading.Thread(target=_watch, args=(listener, note, failures))
    watch.start()
    try:
        text, _ = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        watch.join()
        os.close(listener)
    if failures:
        raise failures[0]
    return process.returncode, text


# -- in the process that is recorded -----------------------------------------------------------------------------------


def _main() -> None:
    """Run Python such that optimizer process and ranks are this process's children, and recorded also."""
    import fuyou.optimizer.process.start

    channel = socket.socket(fileno=int(sys.argv[1]))
    forked.stand_in(setattr, forked.Child)
    setattr(fuyou.optimizer.process.start, "subprocess", forked.as_subprocess(forked.Child))  # noqa: B010
    listener = _listener()
    socket.send_fds(channel, [b"."], [listener])
    channel.close()
    os.close(listener)
    forked.execute(sys.argv[2:])


def _listener() -> int:
    """Have the kernel stop this process's calls from now on; return where it tells of them."""
    flags_of_open = {
        number: 1 if name == "open" else 2 for number, name in _NUMBERS.items() if name[:4] == "open"
    }
    program = [_instruction(_LOAD, 4), _instruction(_JUMP_EQUAL, _audit, 1, 0), _instruction(_RETURN, _ALLOW)]
    program.append(_instruction(_LOAD, 0))
    for number, name in _NUMBERS.items():
        if name in ("open", "openat"):
            argument = 16 + 8 * flags_of_open[number]
            program += [
                _instruction(_JUMP_EQUAL, number, 0, 4), _instruction(_LOAD, argument),
                _instruction(_JUMP_SET, _MEANT, 0, 1), _instruction(_RETURN, _NOTIFY), _instruction(_RETURN, _ALLOW),
            ]  # fmt: skip
        else:
            program += [_instruction(_JUMP_EQUAL, number, 0, 1), _instruction(_RETURN, _NOTIFY)]
    program.append(_instruction(_RETURN, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(program))
    header = struct.pack("<HxxxxxxQ", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    descriptor = libc.syscall(_SECCOMP, 1, _NEW_LISTENER | _WAIT_KILLABLE, header)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    return int(descriptor)


def _instruction(code: int, value: int, when_true: int = 0, when_false: int = 0) -> bytes:
    return _INSTRUCTION.pack(code, when_true, when_false, value)


# -- in the process that records ---------------------------------------------------------------------------------------


def _watch(listener: int, note: Note, failures: list[BaseException]) -> None:
    """Answer until nobody is left who could call."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while True:
        if not any(events & select.POLLIN for _, events in poll.poll()):
            return
        buffer = bytearray(_NOTIFICATION.size)
        try:
            fcntl.ioctl(listener, _RECEIVE, buffer)
        except OSError:
            continue  # the caller was killed meanwhile
        number, pid, _, call, _, _, *arguments = _NOTIFICATION.unpack(buffer)
        name = _NUMBERS[call]
        error = 0
        try:
            error = _Call(pid, name, arguments).take(partial(note, pid))
        except BaseException as failure:
            failures.append(failure)
        answer = _ANSWER.pack(number, 0, -error, 0 if error else _CONTINUE)
        try:
            fcntl.ioctl(listener, _SEND, answer)
        except OSError:
            continue


class _Call:
    """A call that a thread waits in."""

    def __init__(self, pid: int, name: str, arguments: Sequence[int]):
        self._pid, self._name, self._arguments = pid, name, arguments

    def take(self, note: Note) -> int:
        """Note what it will change; return the error number to answer instead, 0 to let it happen."""
        does = _CALLS[self._name][2]
        if does == "refuse":
            return errno.ENOSYS
        getattr(self, f"_{does}")(note)
        return 0

    def _write(self, note: Note) -> None:
        path = self._file()
        if path is None:
            return
        descriptor, address, count, offset = self._arguments[:4]
        if "v" in self._name:
            parts = struct.unpack(f"<{2 * count}Q", self._memory(address, 16 * count))
            data = b"".join(self._memory(*part) for part in zip(parts[::2], parts[1::2], strict=True))
        else:
            data = self._memory(address, count)
        if self._name in ("write", "writev"):
            fields = dict(
                line.split(":\t") for line in self._proc(f"fdinfo/{descriptor}").read_text().splitlines()[:2]
            )
            offset = -1 if int(fields["flags"], 8) & os.O_APPEND else int(fields["pos"])
        note("write", path, offset, data)

    def _open(self, note: Note) -> None:
        flags = self._arguments[1 if self._name == "open" else 2]
        note("open", *self._paths(), bool(flags & os.O_CREAT), bool(flags & os.O_TRUNC))

    def _truncate(self, note: Note) -> None:
        note("truncate", self._file(), self._arguments[1])

    def _allocate(self, note: Note) -> None:
        _, mode, offset, length = self._arguments[:4]
        note("allocate", self._file(), offset + length if not mode else 0)

    def _sync(self, note: Note) -> None:
        note("sync", self._file(folders=True))

    def _touch(self, note: Note) -> None:
        if self._arguments[1]:
            note("touch", *self._paths())
        else:
            note("touch", self._file())

    def _rename(self, note: Note) -> None:
        assert self._name != "renameat2" or not self._arguments[4], "renames that exchange are not recorded"
        note("rename", *self._paths())

    def _link(self, note: Note) -> None:
        note("link", *self._paths())

    def _symlink(self, note: Note) -> None:
        target, *base, address = self._arguments[: 3 if self._name == "symlinkat" else 2]
        note("symlink", self._path(base[0] if base else _AT_FDCWD, address), os.fsencode(self._text(target)))

    def _unlink(self, note: Note) -> None:
        is_folder = self._name == "unlinkat" and self._arguments[2]
        note("rmdir" if is_folder else "unlink", *self._paths())

    def _mkdir(self, note: Note) -> None:
        note("mkdir", *self._paths())

    def _rmdir(self, note: Note) -> None:
        note("rmdir", *self._paths())

    def _file(self, folders: bool = False) -> Path | None:
        """Return the path of the file that is open as the first argument; None: not a file."""
        link = self._proc(f"fd/{self._arguments[0]}")
        try:
            mode = link.stat().st_mode
        except OSError:
            return None  # not open: the call will fail
        is_meant = stat.S_ISREG(mode) or (folders and stat.S_ISDIR(mode))
        return Path(os.readlink(link)) if is_meant else None

    def _paths(self) -> list[Path]:
        """Return the paths that the arguments give."""
        count = 2 if self._name.startswith(("rename", "link")) else 1
        if "at" not in self._name:
            return [self._path(_AT_FDCWD, address) for address in self._arguments[:count]]
        pairs = self._arguments[: 2 * count]
        return [self._path(*pair) for pair in zip(pairs[::2], pairs[1::2], strict=True)]

    def _path(self, base: int, address: int) -> Path:
        descriptor = ctypes.c_int(base & 0xFFFFFFFF).value
        start = self._proc("cwd" if descriptor == _AT_FDCWD else f"fd/{descriptor}")
        path = Path(os.readlink(start)) / self._text(address)
        return Path(os.path.realpath(path.parent)) / path.name

    def _text(self, address: int) -> str:
        text = b""
        while b"\0" not in text:
            text += self._memory(address + len(text), _PAGE - (address + len(text)) % _PAGE)
        return os.fsdecode(text[: text.index(b"\0")])

    def _memory(self, address: int, count: int) -> bytes:
        with self._proc("mem").open("rb", buffering=0) as memory:
            data = os.pread(memory.fileno(), count, address)
        assert len(data) == count or self._name not in ("write", "pwrite64"), f"{len(data)} of {count} bytes"
        return data

    def _proc(self, name: str) -> Path:
        return Path(f"/proc/{self._pid}/{name}")


if __name__ == "__main__":
    _main()
