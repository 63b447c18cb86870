"""Errors between a record and a drive, with advice for the user."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import FinetuneError


class StoreError(FinetuneError):
    """Storage failed, or what lies on it is damaged."""


def describe_os_error(doing: str, path: Path, error: OSError) -> StoreError:
    """Return the ``StoreError`` for an ``error`` while ``doing`` (``"writing 4 MiB at offset 8192"``) to ``path``."""
    inner = Path(os.fsdecode(error.filename2 or error.filename or path))
    at = f" at {inner}" if path in inner.parents else ""  # a file in the directory
    what = f"{doing} of {path.name} in {path.parent} failed{at}: {(error.strerror or str(error)).removesuffix('.')}."
    return StoreError(f"{what} {advice_on(error)}".rstrip())


def advice_on(error: BaseException) -> str:
    """Return a sentence about what to do about a file system's error; empty for others."""
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "Free some space there, and start it again."
    if number == errno.EFBIG:
        return "This shell or file system allows no larger files: enter `ulimit -f unlimited` before."
    if number == errno.EXDEV:
        return (
            "A folder in it is on another file system: move that folder elsewhere, or take another directory."
        )
    if number == errno.EIO:
        return "The drive is failing or was removed: look at the kernel log (dmesg) and at smartctl."
    if number == errno.EROFS:
        return (
            "The file system has become read-only, often after a drive error: look at the kernel log (dmesg)."
        )
    if number in (errno.EACCES, errno.EPERM):
        return "Look at its owner, its permissions, and its attributes (lsattr)."
    if number == errno.EISDIR:
        return "A directory has the name of a file that is read or written there: move it elsewhere."
    return ""


@contextmanager
def described(doing: str, path: Path) -> Iterator[None]:
    """Turn an ``OSError`` inside the context into a ``StoreError`` that names ``path``, which it may not do itself."""
    try:
        yield
    except OSError as error:
        raise describe_os_error(doing, path, error) from error


@contextmanager
def opened(path: Path, doing: str, flags: int) -> Iterator[int]:
    """Open ``path`` while the context lasts, within :func:`described`."""
    with described(doing, path):
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
