"""The commit record: one small file that says which step is whole on the drives.

The caller first finishes every write of the step and syncs every file (``Store.sync``); the rename in
``commit_manifest`` is then the instant at which the step exists.
"""

from pathlib import Path
from typing import Any

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
