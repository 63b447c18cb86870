"""Files that appear whole: after a crash at any instant there is the old content or the new, never a part of it."""

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

TEMPORARY_SUFFIX = ".tmp"  # End of the name under which a file is written until it is complete


def replace_file(path: Path, text: str, *, durable: bool = False, suffix: str = TEMPORARY_SUFFIX) -> None:
    """Write ``text`` to a temporary file beside ``path`` and rename that to ``path``.

    Args:
        durable: sync the file before the rename. The directory is the caller's to sync.
        suffix: what the temporary file's name has behind that of ``path``; several writers need one each.

    Raises:
        OSError: the system refused; the old file is untouched.
    """
    temporary = path.with_name(path.name + suffix)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            rest = memoryview(text.encode())
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


@contextmanager
def file_when_complete(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside ``path`` that is synced and renamed to ``path`` when the context ends.

    On any error it is removed. Only one process at a time may write a ``path``.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
