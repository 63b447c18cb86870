"""Sealed files: small JSON files with a checksum, which are either whole or known to be damaged."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from common.files.atomic import replace_file
from common.store.errors import StoreError, describe_os_error, described, opened


def write_sealed(path: Path, content: dict[str, Any]) -> None:
    """Replace ``path`` by ``content`` and a checksum: after a crash at any instant the old or the new file is there.

    Raises:
        StoreError: the file system refused; the old file is untouched.
        TypeError: ``content`` is not JSON.
    """
    # Through JSON once, so that the checksum covers what a reader will see (keys become strings, tuples lists).
    content = json.loads(json.dumps(content))
    text = json.dumps({"blake2b": _checksum(content), "content": content}, indent=1) + "\n"
    with described("writing", path):
        replace_file(path, text, durable=True)
    sync_directory(path.parent)


def read_sealed(path: Path) -> dict[str, Any] | None:
    """Return the content of ``path``, or None if there is no such file.

    Raises:
        StoreError: the file is damaged or cannot be read.
    """
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise describe_os_error("reading", path, error) from error
    try:
        sealed = json.loads(text)
        content, checksum = sealed["content"], sealed["blake2b"]
        intact = isinstance(content, dict) and checksum == _checksum(content)
    except (ValueError, TypeError, KeyError, RecursionError):
        intact = False
    if not intact:
        raise StoreError(
            f"{path} is damaged: its {len(text)} bytes do not match their checksum. Restore it from a copy, or delete "
            "the store by hand and start again."
        )
    return content


def sync_directory(directory: Path) -> None:
    """Make creations, renames and removals in ``directory`` durable (they are not, by syncing the files alone).

    Raises:
        StoreError: the drive refused.
    """
    with opened(directory, "syncing", os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)


def _checksum(content: Any) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()
