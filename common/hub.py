"""A hub: what names look like there, and whether anything may be fetched. Imports nothing slow."""

import os
import re
from pathlib import Path

NO_DOWNLOAD = "FINETUNE_NO_DOWNLOAD"  # Environment variable that forbids downloads


def is_hub_name(name: str) -> bool:
    """Return whether this can be the name of something on a hub: ``owner/name``."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not name.startswith((".", "~"))


def snapshot_name(directory: Path) -> str | None:
    """Return the hub's name of a model whose snapshot ``directory`` is in the local cache; None: not a snapshot."""
    match = re.search(r"models--([^/]+?)--([^/]+)/snapshots/[^/]+/?$", str(directory))
    return f"{match[1]}/{match[2]}" if match else None


def is_in_cache(name: str) -> bool:
    """Return whether the local cache has something of a hub's model."""
    from huggingface_hub import constants

    return (Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}").is_dir()


def stay_offline(downloads: bool) -> None:
    """Keep this process and those that it starts from fetching, unless models and data may be fetched.

    Call it before huggingface_hub is imported.
    """
    if not downloads:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def may_download() -> bool:
    """Return whether something that a hub has may be fetched."""
    from huggingface_hub import constants

    return not (constants.HF_HUB_OFFLINE or NO_DOWNLOAD in os.environ)
