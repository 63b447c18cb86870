"""What is worth keeping between runs: small results, one JSON file each, found by everything that they depend on."""

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

CACHE_VARIABLE = "FINETUNE_CACHE"
"""Environment variable: another directory for what is kept between runs."""


def cache_directory() -> Path:
    """Where results are kept: ``$FINETUNE_CACHE``, else ``$XDG_CACHE_HOME/finetune``, else ``~/.cache/finetune``."""
    own = os.environ.get(CACHE_VARIABLE)
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "finetune"


def read_cached(kind: str, key: dict[str, Any], version: int) -> dict[str, Any] | None:
    """Return the content that was written under ``key``; None if there is none, it is of another version, or its file
    is damaged.

    Args:
        kind: name of the folder.
        key: everything that the content depends on, as JSON can carry it.
        version: of the content's format.
    """
    try:
        content = json.loads(cached_path(kind, key).read_text(encoding="utf-8"))
        return dict(content) if content["format"] == version and content["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_cached(kind: str, key: dict[str, Any], version: int, **content: Any) -> None:
    """Keep ``content`` for :func:`read_cached`. A directory that cannot be written to costs the next run its result."""
    path = cached_path(kind, key)
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps({"format": version, "key": key, **content}, indent=1))
        beside.replace(path)


def cached_path(kind: str, key: dict[str, Any]) -> Path:
    """Return the file for ``key``."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_directory() / kind / f"{digest[:24]}.json"
