"""From what the user named to records: finding data files and reading them with ``datasets``.

Files are read as streams (``load_dataset(..., streaming=True)``): a few MiB at a time, nothing converted on
disk, no network. Two cases need a whole file in memory: a ``.json`` file that is one list, and a text file without
line breaks.
"""

import glob
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common.errors import UserError, did_you_mean

READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
"""Extension of a data file and the ``datasets`` module that reads it."""

RECORDS_PER_READ = 256

KNOWN_EXTENSIONS = ", ".join(READERS)


def find_files(names: tuple[str, ...]) -> list[Path]:
    """The data files behind ``names``: each a file, or a directory searched recursively in sorted order.

    In a directory, hidden entries and files that are not data (by extension) are passed over.

    Raises:
        UserError: a name does not exist, is not a known kind of file, or is a directory without data files.
    """
    found: list[Path] = []
    for name in names:
        path = Path(name).expanduser().absolute()
        if path.is_dir():
            found += _files_below(path)
        elif not path.exists():
            siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
            raise UserError(f"There is no data file {name!r}.{did_you_mean(path.name, siblings)}")
        elif path.suffix.lower() not in READERS:
            raise UserError(
                f"{name!r} is not a kind of data file that can be read: known extensions are {KNOWN_EXTENSIONS}."
            )
        else:
            found.append(path)
    return found


def _files_below(directory: Path) -> list[Path]:
    entries = [
        path
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(directory).parts)
    ]
    data = [path for path in entries if path.suffix.lower() in READERS]
    if not data:
        seen = sorted({path.suffix or path.name for path in entries})
        raise UserError(
            f"No data files in the directory {str(directory)!r}: known extensions are {KNOWN_EXTENSIONS}; "
            f"it holds {', '.join(seen[:10]) or 'nothing'}."
        )
    return data


def read_records(path: Path, scratch: Path) -> Iterator[dict[str, Any]]:
    """The records of one file, in order. A text file gives one record per line, line break included, as ``text``.

    Every value of a CSV file is a string, exactly as written (``007`` and ``NA`` stay what they are).

    Args:
        path: the data file.
        scratch: an existing directory; ``datasets`` keeps its lock files in a temporary folder in there.

    Raises:
        UserError: the file cannot be read; names the file and, for broken JSON lines, the line.
    """
    if path.stat().st_size == 0:
        return
    reader = READERS[path.suffix.lower()]
    if reader == "json":
        _check_json_start(path)
    with _quiet_datasets(), tempfile.TemporaryDirectory(prefix=".datasets-", dir=scratch) as cache_dir:
        try:
            for batch in _open_stream(reader, path, cache_dir).iter(batch_size=RECORDS_PER_READ):
                columns = list(batch)
                for values in zip(*batch.values(), strict=True):
                    yield dict(zip(columns, values, strict=True))
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 text: {error}.") from error
        except (ValueError, OSError, StopIteration) as error:  # pyarrow's and pandas' errors are ValueErrors
            raise UserError(f"{path} cannot be read: {_explain(reader, path, error)}") from error


def _open_stream(reader: str, path: Path, cache_dir: str) -> Any:
    """A streaming ``datasets`` dataset over one file."""
    import datasets  # not at the top: 90 MB and a second that runs without data files need not pay

    def load(**options: Any) -> Any:
        pattern = glob.escape(str(path))
        return datasets.load_dataset(
            reader, data_files=[pattern], split="train", streaming=True, cache_dir=cache_dir, **options
        )

    if reader == "text":
        return load(keep_linebreaks=True)
    if reader == "parquet":
        return load(batch_size=RECORDS_PER_READ)
    if reader == "json":
        try:
            # Otherwise chats with columns such as id, source, model are taken for logs of coding agents.
            return load(parse_agent_traces=False)
        except TypeError:  # datasets 4 does not know the option, nor the logs
            return load()
    # Columns are only read as strings when named; left to guess, pandas would turn 007 into 7 and NA into nothing.
    columns = load(chunksize=RECORDS_PER_READ).column_names or []
    strings = datasets.Features({column: datasets.Value("string") for column in columns})
    return load(features=strings, keep_default_na=False, chunksize=RECORDS_PER_READ)


@contextmanager
def _quiet_datasets() -> Iterator[None]:
    """Errors come to the user as ``UserError``, not as progress bars and log lines as well."""
    import datasets

    bars, verbosity = datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if not bars:
            datasets.enable_progress_bars()


def _check_json_start(path: Path) -> None:
    """Refuse what is not objects: pyarrow's JSON reader crashes the process on a file that starts with ``null``."""
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if start and not start.startswith((b"{", b"[")):
        found = start[:40].decode(errors="replace")
        raise UserError(f'{path}, line 1: expected JSON objects such as {{"text": "..."}}, found {found!r}.')


def _explain(reader: str, path: Path, error: BaseException) -> str:
    if reader == "json" and (broken := _first_broken_line(path)):
        return broken
    return f"{type(error).__name__}: {error}" if str(error) else "no records found in it."


def _first_broken_line(path: Path) -> str | None:
    """Where a JSON-lines file breaks, or None if every line is JSON or the file is not made of lines."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                json.loads(line)
            except json.JSONDecodeError as error:
                if number == 1 and path.suffix.lower() == ".json":
                    return None
                return f"line {number} is not JSON ({error.msg} at column {error.colno}): {line.strip()[:80]!r}"
    return None
