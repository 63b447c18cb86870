"""The commit record: one small file that says which step is whole on the drives.

The caller first finishes every write of the step and syncs every file (``Store.sync``); the rename in
``commit_manifest`` is then the instant at which the step exists.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.errors import FinetuneError
from common.store.sealed import read_sealed, write_sealed

MANIFEST_FILE = "manifest.json"


def commit_manifest(directory: Path, content: dict[str, Any]) -> None:
    """Replace the manifest in ``directory``: written beside the old one, synced, renamed over it, directory synced.

    Raises:
        StoreError: the file system refused; the previous manifest still holds.
    """
    write_sealed(Path(directory) / MANIFEST_FILE, content)


def load_manifest(directory: Path) -> dict[str, Any] | None:
    """Return the last committed content (as JSON has it: tuples are lists); None if nothing was ever committed.

    Raises:
        StoreError: the manifest is damaged.
    """
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
