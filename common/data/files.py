"""Find the data files that the user has named: files, directories, and data sets of a hub in its local caches."""

import contextlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.data.read import KNOWN_EXTENSIONS, READERS, extension_of
from common.errors import UserError, did_you_mean, on_one_line
from common.files import no_data_file, read_text_file
from common.hub import is_hub_name, may_download
from common.units import counted

_HEADER_BYTES = 1 << 20  # Bytes of a README in which its header is looked for
TRAIN = "train"  # Split of a name without one

# Files in which `datasets` describes a data set.
_ABOUT_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json")

# Words in the names of files and directories that say which split they are: those that `datasets` knows.
_SPLIT = re.compile(
    r"(?:^|[-._ 0-9/])(?:(train|training)|(validation|valid|dev|val)|(test|testing|eval|evaluation))(?=[-._ 0-9/]|$)",
    re.I,
)

# Names of a set of files that count them, as in train-00002-of-00003.parquet.
_SHARD = re.compile(r"(.*?)(\d{5})-of-(\d{5})(?!\d)")


# Files in which `datasets` keeps what it has made of a data set, next to that.
_MADE_OF_DATA = re.compile(r"cache-[0-9a-f]{16}(_\d{5}_of_\d{5})?\.arrow")


def find_files(names: tuple[str, ...]) -> list[Path]:
    """Return the data files of ``names``: each a file, a directory searched recursively in sorted order, or a hub's
    data set.

    A directory of several splits gives ``train``, or the split in ``directory:split``. Hidden entries and files that
    are not data (by extension) are passed over. Of files that count themselves, a directory has to hold all.
    """
    files: list[Path] = []
    for name in names:
        path = Path(name).expanduser().absolute()
        start, _, split = name.partition(":")
        directory = Path(start).expanduser().absolute()
        if path.is_dir():
            files += _files_in(path, "")
        elif not path.exists() and directory.is_dir():
            files += _files_in(directory, split)
        elif not path.parent.is_dir() and extension_of(path) not in READERS and is_hub_name(start):
            files += _hub_files(name)
        elif not path.exists():
            raise no_data_file(name)
        else:
            files.append(path)
    if unknown := [file for file in files if extension_of(file) not in READERS]:
        raise UserError(
            f"{str(unknown[0])!r} cannot be read as data: known extensions are {KNOWN_EXTENSIONS}."
        )
    folders = {file.parent for file in files if not _MADE_OF_DATA.fullmatch(file.name)}
    if derived := [file for file in files if _MADE_OF_DATA.fullmatch(file.name) and file.parent in folders]:
        raise UserError(
            f"{derived[0]} is what datasets has made of the files next to it, which would be trained on twice: name "
            f"the directory, {derived[0].parent}, or one of both."
        )
    if len(files) > 1 and (empty := [file for file in files if file.is_file() and not file.stat().st_size]):
        raise UserError(
            f"{empty[0]} has 0 bytes, as if it was not written to its end: write it again, or remove it."
        )
    return files


def _files_in(directory: Path, split: str) -> list[Path]:
    readme = directory / "README.md"
    if readme.is_file() and re.match(rb"---\n.*?^configs:", _beginning(readme), re.S | re.M):
        return _files_of_split(f"{directory}:{split}" if split else str(directory), str(directory))
    splits: dict[str, list[Path]] = {}
    for path in _data_below(directory):
        inner = path.relative_to(directory)
        word = _SPLIT.search(str(inner))
        name = "" if word is None else (TRAIN, "validation", "test")[(word.lastindex or 0) - 1]
        if (directory / "dataset_dict.json").is_file():  # `datasets` has saved it, a directory for each split
            name = inner.parts[0]
        splits.setdefault(name, []).append(path)
    if len(splits) == 1 and not split:
        return complete(next(iter(splits.values())))
    chosen = split or TRAIN
    if chosen not in splits or ("" in splits and not split):
        rest = f", and files of no split, such as {splits.pop('')[0]}" if "" in splits else ""
        raise UserError(
            f"{directory} holds the splits {', '.join(splits) or 'none'}{rest}: name one, as in "
            f"{directory}:{next(iter(splits), TRAIN)}, or files, as in '{directory}/*.jsonl'."
        )
    return complete(splits[chosen])


def complete(files: list[Path]) -> list[Path]:
    """Return the files, after a look for those that their names count and that are not there."""
    named = {(file.parent, match[1], int(match[3])) for file in files if (match := _SHARD.match(file.name))}
    for directory, prefix, count in sorted(named):
        data = [_SHARD.match(file.name) for file in directory.iterdir() if extension_of(file) in READERS]
        numbers = {int(match[2]) for match in data if match and (match[1], int(match[3])) == (prefix, count)}
        first = 1 if count in numbers else 0
        if missing := sorted(set(range(first, first + count)) - numbers):
            raise UserError(
                f"{directory / prefix}{missing[0]:05}-of-{count:05} is missing, "
                f"{counted(len(missing), 'file')} of {count:,} in all: fetch it, or name the files to read."
            )
    return files


def _beginning(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(_HEADER_BYTES)


def _data_below(directory: Path) -> list[Path]:
    """Return the data files below a directory; where ``datasets`` has saved a set, those that it names."""
    entries = [
        path
        for path in sorted(directory.rglob("*"))
        if (path.is_file() or not path.exists())
        and not any(part.startswith(".") for part in path.relative_to(directory).parts)
    ]
    data = [path for path in entries if extension_of(path) in READERS and path.name not in _ABOUT_DATA]
    if dangling := [path for path in data if not path.exists()]:
        raise UserError(
            f"{dangling[0]} is a link to {dangling[0].readlink()}, which does not exist: fetch it."
        )
    for state in [
        path for path in data if path.name == "state.json" and path.with_name("dataset_info.json").is_file()
    ]:
        try:
            names = {
                str(file["filename"]) for file in json.loads(read_text_file(state)).get("_data_files", [])
            }
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{state} does not list the files of a data set: {on_one_line(error)}") from error
        if missing := sorted(name for name in names if not state.with_name(name).is_file()):
            raise UserError(
                f"{state.with_name(missing[0])} is missing, which {state.name} lists: save the data again."
            )
        data = [path for path in data if path.parent != state.parent or path.name in names]
    if not data:
        seen = sorted({path.suffix or path.name for path in entries})
        raise UserError(
            f"No data files in the directory {str(directory)!r}: known extensions are {KNOWN_EXTENSIONS}; "
            f"it holds {', '.join(seen[:10]) or 'nothing'}."
        )
    return data


def _hub_files(name: str) -> list[Path]:
    """Return the files of ``owner/name``, ``owner/name:split``, or ``owner/name:configuration:split``: as fetched, else
    as ``datasets`` has prepared them, else fetched now."""
    import datasets
    import huggingface_hub

    repository, *parts = name.split(":", 2)
    with contextlib.suppress(OSError, ValueError):  # not in the cache, or only a part of it
        return _files_of_split(
            name, huggingface_hub.snapshot_download(repository, repo_type="dataset", local_files_only=True)
        )
    if datasets.config.HF_HUB_OFFLINE:  # otherwise it would ask the hub
        with contextlib.suppress(Exception):  # every version raises a different error for "not found"
            loaded: Any = datasets.load_dataset(repository, *parts[:-1], split=parts[-1] if parts else TRAIN)
            return [Path(file["filename"]) for file in loaded.cache_files]
    if not may_download():
        raise UserError(
            f"There is no data file {name!r}, nor a data set of a hub in the local caches. Fetch it with "
            f"`hf download --repo-type dataset {repository}`, or add --download."
        )
    try:
        snapshot = huggingface_hub.snapshot_download(repository, repo_type="dataset")
    except Exception as error:  # the network's, the hub's and the disk's errors
        raise UserError(
            f"The data set {repository!r} cannot be fetched: {type(error).__name__}: {error}"
        ) from error
    return _files_of_split(name, snapshot)


def _files_of_split(name: str, directory: str) -> list[Path]:
    """Return the files of the configuration and split in ``name`` of a data set, by the rules of ``datasets``."""
    import datasets

    repository, *parts = name.split(":", 2)
    split = parts[-1] if parts else TRAIN
    try:
        builder: Any = datasets.load_dataset_builder(directory, *parts[:-1])
    except Exception as error:  # among them: there are several configurations, which its message names
        first = " ".join(str(error).splitlines()[:2])
        raise UserError(
            f"The data set {name!r} in {directory} cannot be read: {first} (NAME:CONFIGURATION:SPLIT chooses one.)"
        ) from error
    splits: dict[str, Sequence[str]] = {
        str(key): files for key, files in (builder.config.data_files or {}).items()
    }
    if split not in splits:
        raise UserError(
            f"The data set {name!r} has no split {split!r}, but {', '.join(splits) or 'none'}: give "
            f"{repository}:SPLIT.{did_you_mean(split, splits)}"
        )
    return complete([Path(file) for file in splits[split]])
