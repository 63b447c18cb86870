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
    what = f"{doing} of {path.name} in {path.parent} failed: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what += ". Free some space there, and start it again."
    elif error.errno == errno.EFBIG:
        what += ". This shell or file system allows no larger files: enter `ulimit -f unlimited` before."
    elif error.errno == errno.EXDEV:
        what += ". A folder in it is on another file system: move that folder elsewhere, or take another directory."
    elif error.errno == errno.EIO:
        what += ". The drive is failing or was removed: look at the kernel log (dmesg) and at smartctl."
    elif error.errno == errno.EROFS:
        what += ". The file system has become read-only, often after a drive error: look at the kernel log (dmesg)."
    elif error.errno in (errno.EACCES, errno.EPERM):
        what += ". Look at its owner, its permissions, and its attributes (lsattr)."
    return StoreError(what if what.endswith(".") else f"{what}.")


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
