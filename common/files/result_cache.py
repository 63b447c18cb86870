"""A cache of small results between runs: one JSON file each, found by everything that the result depends on."""

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from common.files.atomic import replace_file

CACHE_VARIABLE = "FINETUNE_CACHE"  # Name of the environment variable that gives the cache another directory


def cache_directory() -> Path:
    """Return the cache: ``$FINETUNE_CACHE``, else ``$XDG_CACHE_HOME/finetune``, else ``~/.cache/finetune``."""
    own = os.environ.get(CACHE_VARIABLE)
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "finetune"


def read_cached(kind: str, key: dict[str, Any], version: int) -> dict[str, Any] | None:
    """Return the content that was written under ``key``; None if there is none, it has another version, or it is
    damaged.

    Args:
        kind: name of the folder.
        key: everything that the content depends on, as JSON can carry it.
        version: version of the content's format.
    """
    try:
        content = json.loads(cached_path(kind, key).read_text(encoding="utf-8"))
        return dict(content) if content["format"] == version and content["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_cached(kind: str, key: dict[str, Any], version: int, **content: Any) -> None:
    """Write ``content`` for :func:`read_cached`; where the directory cannot be written to, nothing is cached."""
    path = cached_path(kind, key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": version, "key": key, **content}, indent=1)
        replace_file(path, text, suffix=f".{os.getpid()}.tmp")


def cached_path(kind: str, key: dict[str, Any]) -> Path:
    """Return the file for ``key``."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_directory() / kind / f"{digest[:24]}.json"
