"""Checksummed JSON files, and the manifest: one small file that names the committed step.

The caller first finishes every write of the step and syncs every file (``Store.sync``); the rename in
``commit_manifest`` is then the instant at which the step exists.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.errors import FinetuneError
from common.files import check_regular, replace_file
from common.store.errors import StoreError, describe_os_error, described, opened


def write_sealed(path: Path, content: dict[str, Any]) -> None:
    """Replace ``path`` by ``content`` and a checksum: after a crash at any instant the old or the new file is there."""
    # Through JSON once, so that the checksum covers what a reader will see (keys become strings, tuples lists).
    content = json.loads(json.dumps(content))
    text = json.dumps({"blake2b": _checksum(content), "content": content}, indent=1) + "\n"
    with described("writing", path):
        replace_file(path, text)


def read_sealed(path: Path) -> dict[str, Any] | None:
    """Return the content of ``path``, or None if there is no such file; a damaged one is a StoreError."""
    try:
        check_regular(path)
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise describe_os_error("reading", path, error) from error
    try:
        sealed = json.loads(text)
        content = sealed["content"]
        checksum = sealed["blake2b"]
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
    """Make creations, renames and removals in ``directory`` durable (they are not, by syncing the files alone)."""
    with opened(directory, "syncing", os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)


def _checksum(content: Any) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


MANIFEST_FILE = "manifest.json"


def commit_manifest(directory: Path, content: dict[str, Any]) -> None:
    """Replace the manifest in ``directory``; see :func:`write_sealed`."""
    write_sealed(Path(directory) / MANIFEST_FILE, content)


def load_manifest(directory: Path) -> dict[str, Any] | None:
    """Return the last committed content (as JSON has it: tuples are lists); None if nothing was ever committed."""
    return read_sealed(Path(directory) / MANIFEST_FILE)


def first_manifest(directories: Iterable[Path]) -> dict[str, Any]:
    """Return the content of the first manifest in ``directories`` that can be read; empty if there is none."""
    for directory in directories:
        try:
            content = load_manifest(directory)
        except (FinetuneError, OSError):
            continue
        if content is not None:
            return content
    return {}
