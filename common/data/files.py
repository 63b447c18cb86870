"""Find the data files that the user has named: files, directories, and data sets of a hub."""

import json
import re
from pathlib import Path

from common.data.hub_files import TRAIN, files_of_split, hub_files, is_data_set_name
from common.data.records import KNOWN_EXTENSIONS, READERS, extension_of
from common.errors import UserError, did_you_mean

# Files in which `datasets` describes a data set.
_ABOUT_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json")

# Words in the names of files and directories that say which split they are: those that `datasets` knows.
_SPLIT = re.compile(
    r"(?:^|[-._ 0-9/])(?:(train|training)|(validation|valid|dev|val)|(test|testing|eval|evaluation))(?=[-._ 0-9/]|$)",
    re.I,
)


def find_files(names: tuple[str, ...]) -> list[Path]:
    """Return the data files behind ``names``: each a file, a directory searched recursively in sorted order, or a hub's
    data set (:mod:`common.data.hub_files`).

    A directory of several splits gives ``train``, or the split in ``directory:split``. Hidden entries and files that
    are not data (by extension) are passed over.

    Raises:
        UserError: if a name does not exist, is no known kind of file, or is a directory without data files.
    """
    files: list[Path] = []
    for name in names:
        path = Path(name).expanduser().absolute()
        start, *split = name.split(":")
        directory = Path(start).expanduser().absolute()
        if path.is_dir() or (not path.exists() and directory.is_dir()):
            files += _files_in(path) if path.is_dir() else _files_in(directory, *split)
        elif not path.parent.is_dir() and extension_of(path) not in READERS and is_data_set_name(name):
            files += hub_files(name)
        elif not path.exists():
            siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
            raise UserError(f"There is no data file {name!r}.{did_you_mean(path.name, siblings)}")
        else:
            files.append(path)
        if unknown := [file for file in files if extension_of(file) not in READERS]:
            raise UserError(
                f"{str(unknown[0])!r} is not a kind of data file that can be read: known extensions are "
                f"{KNOWN_EXTENSIONS}."
            )
    return files


def file_states(files: list[Path]) -> list[tuple[str, int, int]]:
    """Return path, size and time of change of each file: what is prepared from them is kept while these stay equal."""
    return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]


def _files_in(directory: Path, *split: str) -> list[Path]:
    about, readme = directory / "dataset_dict.json", directory / "README.md"
    if readme.is_file() and re.match(r"---\n.*?^configs:", readme.read_text(errors="replace"), re.S | re.M):
        return files_of_split(":".join((str(directory), *split)), str(directory))
    splits: dict[str, list[Path]] = {}
    if about.is_file():
        splits = {str(name): _data_below(directory / name) for name in json.loads(about.read_text())["splits"]}
    else:
        for path in _data_below(directory):
            word = _SPLIT.search(str(path.relative_to(directory)))
            name = "" if word is None else ("train", "validation", "test")[(word.lastindex or 0) - 1]
            splits.setdefault(name, []).append(path)
    if len(splits) == 1 and not split:
        return next(iter(splits.values()))
    chosen = split[0] if split else TRAIN
    if chosen not in splits or ("" in splits and not split):
        rest = f", and files of no split, such as {splits.pop('')[0]}" if "" in splits else ""
        raise UserError(
            f"{directory} holds the splits {', '.join(splits) or 'none'}{rest}: name one, as in "
            f"{directory}:{next(iter(splits), TRAIN)}, or files, as in '{directory}/*.jsonl'."
        )
    return splits[chosen]


def _data_below(directory: Path) -> list[Path]:
    """Return the data files below a directory; where ``datasets`` has saved a set, those that it names."""
    entries = [
        path
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(directory).parts)
    ]
    data = [path for path in entries if extension_of(path) in READERS and path.name not in _ABOUT_DATA]
    for about in (
        path for path in entries if path.name == "dataset_info.json" and path.with_name("state.json") in data
    ):
        state = json.loads(about.with_name("state.json").read_text())
        named = [about.with_name(str(file["filename"])) for file in state.get("_data_files", [])]
        data = [path for path in data if path.parent != about.parent or path in named]
    if not data:
        seen = sorted({path.suffix or path.name for path in entries})
        raise UserError(
            f"No data files in the directory {str(directory)!r}: known extensions are {KNOWN_EXTENSIONS}; "
            f"it holds {', '.join(seen[:10]) or 'nothing'}."
        )
    return data
