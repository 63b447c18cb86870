"""Data sets by a hub's name: the files that ``huggingface_hub`` or ``datasets`` have in their local caches."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.errors import UserError, did_you_mean
from common.hub import is_hub_name, may_download

TRAIN = "train"  # Split that a name without one stands for


def is_data_set_name(name: str) -> bool:
    """Return whether this can be ``owner/name``, ``owner/name:split`` or ``owner/name:configuration:split``."""
    repository, *parts = name.split(":")
    return is_hub_name(repository) and len(parts) <= 2 and all(parts)


def hub_files(name: str) -> list[Path]:
    """Return the files of a hub's data set, from the local caches; it is fetched if that is allowed.

    What was fetched as it is (``hf download --repo-type dataset``) is read where it lies, by the rules of ``datasets``
    about which file belongs to which split. What ``datasets`` has prepared itself is taken where that is not there.

    Raises:
        UserError: if it does not exist, or has no such split or configuration.
    """
    import huggingface_hub

    repository, configuration, split = _parsed(name)
    snapshot: str | None = None
    with contextlib.suppress(OSError, ValueError):  # not in the cache, or only a part of it
        snapshot = huggingface_hub.snapshot_download(repository, repo_type="dataset", local_files_only=True)
    if snapshot is not None:
        return files_of_split(name, snapshot)
    prepared = _prepared(repository, configuration, split)
    if prepared:
        return prepared
    if not may_download():
        raise UserError(
            f"There is no data file {name!r}, nor a data set of a hub in the local caches. Fetch it with "
            f"`hf download --repo-type dataset {repository}`, or add --download."
        )
    try:
        snapshot = huggingface_hub.snapshot_download(repository, repo_type="dataset")
    except Exception as error:  # the network's, the hub's and the disk's errors
        raise UserError(f"The data set {repository!r} cannot be fetched: {type(error).__name__}: {error}") from error
    return files_of_split(name, snapshot)


def _parsed(name: str) -> tuple[str, str | None, str]:
    """Return what a name consists of: repository or directory, configuration, and split."""
    repository, *parts = name.split(":")
    return repository, parts[0] if len(parts) > 1 else None, parts[-1] if parts else TRAIN


def files_of_split(name: str, directory: str) -> list[Path]:
    """Return the files of the configuration and split in ``name`` of a data set in ``directory``, by the rules of
    ``datasets``.

    Raises:
        UserError: if it has none of that name.
    """
    import datasets

    _, configuration, split = _parsed(name)
    try:
        builder: Any = datasets.load_dataset_builder(directory, configuration)
    except Exception as error:  # among them: there are several configurations, which its message names
        first = str(error).splitlines()[:2]
        raise UserError(
            f"The data set {name!r} in {directory} cannot be read: {' '.join(first)} (NAME:CONFIGURATION:SPLIT chooses "
            "one.)"
        ) from error
    splits: dict[str, Sequence[str]] = {str(key): files for key, files in (builder.config.data_files or {}).items()}
    if split not in splits:
        raise UserError(
            f"The data set {name!r} has no split {split!r}, but {', '.join(splits) or 'none'}: give "
            f"{name.split(':')[0]}:SPLIT.{did_you_mean(split, splits)}"
        )
    return [Path(file) for file in splits[split]]


def _prepared(repository: str, configuration: str | None, split: str) -> list[Path]:
    """Return the files that ``datasets`` has made of a data set when it was loaded; none: it has not."""
    import datasets

    if not datasets.config.HF_HUB_OFFLINE:
        return []  # it would ask the hub
    try:
        loaded: Any = datasets.load_dataset(repository, configuration, split=split)
    except Exception:  # it is not there, in each version in other words
        return []
    return [Path(file["filename"]) for file in loaded.cache_files]
