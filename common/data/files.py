"""Find the data files that the user has named, and read their records with ``datasets``.

Files are read as streams (``load_dataset(..., streaming=True)``): a few MiB at a time, nothing converted on
disk, no network. What needs a whole file in memory: a ``.json`` file that is one list, and a file that is one line.
A compressed file is unpacked beside what is made of it, and removed when it is read.
"""

import glob
import json
import lzma
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from common.data.hub_files import hub_files, is_data_set_name
from common.errors import UserError, did_you_mean

READERS = {
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
    ".arrow": "arrow",  # as save_to_disk of datasets leaves them in a directory
}
"""Extension of a data file and the ``datasets`` module that reads it."""

RECORDS_PER_READ = 256

_SCRATCH = ".datasets-"

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
"""Extensions behind these of compressed files."""

KNOWN_EXTENSIONS = f"{', '.join(READERS)} (and {', '.join(COMPRESSIONS)} behind them)"


class DataRecord(NamedTuple):
    """One record of a data file."""

    values: dict[str, Any]
    """Values by column."""
    place: str
    """Place in the file: ``line 7``, or ``record 7`` where records may take several lines or have none."""


def find_files(names: tuple[str, ...]) -> list[Path]:
    """Return the data files behind ``names``: each a file, a directory searched recursively in sorted order, or a
    hub's data set (:mod:`common.data.hub_files`).

    In a directory, hidden entries and files that are not data (by extension) are passed over.

    Raises:
        UserError: a name does not exist, is not a known kind of file, or is a directory without data files.
    """
    found: list[Path] = []
    for name in names:
        path = Path(name).expanduser().absolute()
        if path.is_dir():
            found += _saved_dataset(path) or _files_below(path)
        elif not path.parent.is_dir() and extension_of(path) not in READERS and is_data_set_name(name):
            found += hub_files(name)
        elif not path.exists():
            siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
            raise UserError(f"There is no data file {name!r}.{did_you_mean(path.name, siblings)}")
        elif extension_of(path) not in READERS:
            raise UserError(
                f"{name!r} is not a kind of data file that can be read: known extensions are {KNOWN_EXTENSIONS}."
            )
        else:
            found.append(path)
    return found


def extension_of(path: Path) -> str:
    """Return the extension that says what a data file holds: ``.jsonl`` of ``chats.jsonl.gz``."""
    compressed = path.suffix.lower() in COMPRESSIONS
    return (path.with_suffix("") if compressed else path).suffix.lower()


def is_text_file(path: Path) -> bool:
    """Return whether a data file is one document, without records."""
    return READERS.get(extension_of(path)) == "text"


def _saved_dataset(directory: Path) -> list[Path]:
    """Return the files of a data set that ``datasets`` has saved there with ``save_to_disk``; empty: there is none.

    Raises:
        UserError: it has several splits, and none is called ``train``.
    """
    splits = directory / "dataset_dict.json"
    if splits.is_file():
        names = [str(name) for name in json.loads(splits.read_text()).get("splits", [])]
        if "train" not in names:
            raise UserError(f"{directory} holds the splits {', '.join(names)}: name one, {directory}/{names[0]}.")
        directory = directory / "train"
    state = directory / "state.json"
    if not state.is_file():
        return []
    return [directory / str(file["filename"]) for file in json.loads(state.read_text()).get("_data_files", [])]


def file_states(files: list[Path]) -> list[tuple[str, int, int]]:
    """Return path, size and time of change of each file: what is prepared from them is kept while these stay equal."""
    return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]


def _files_below(directory: Path) -> list[Path]:
    entries = [
        path
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(directory).parts)
    ]
    data = [path for path in entries if extension_of(path) in READERS]
    if not data:
        seen = sorted({path.suffix or path.name for path in entries})
        raise UserError(
            f"No data files in the directory {str(directory)!r}: known extensions are {KNOWN_EXTENSIONS}; "
            f"it holds {', '.join(seen[:10]) or 'nothing'}."
        )
    return data


@contextmanager
def reading(directory: Path) -> Iterator[Path]:
    """Make a scratch folder in ``directory`` for the lock files of ``datasets``, and keep that library quiet meanwhile.

    Its errors reach the user as ``UserError``, not as log lines and progress bars as well. Only one process at a time
    may do this in a directory: what a killed one has left there is removed.
    """
    import datasets

    for left in directory.glob(f"{_SCRATCH}*"):
        shutil.rmtree(left, ignore_errors=True)

    bars, verbosity = datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    counts = datasets.config.HF_UPDATE_DOWNLOAD_COUNTS
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # or a file on disk is reported to the hub, now and then
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=directory) as scratch:
            yield Path(scratch)
    finally:
        datasets.logging.set_verbosity(verbosity)
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = counts
        if not bars:
            datasets.enable_progress_bars()


def read_records(path: Path, scratch: Path) -> Iterator[DataRecord]:
    """Read the records of one file, in order. A text file gives a record per line, line break included, as ``text``.

    Every value of a CSV file is a string, exactly as written (``007`` and ``NA`` stay what they are). In tables
    (Parquet, and a JSON list, which is read as one) all records have the keys of all others, within their values too:
    those without a value are taken away there. In JSON lines, null is what was written.

    Args:
        path: the data file.
        scratch: a directory from ``reading``.

    Raises:
        UserError: the file cannot be read; names the file and, for broken JSON lines, the line.
    """
    if path.suffix.lower() in COMPRESSIONS:
        yield from _read_compressed(path, scratch)
        return
    reader = READERS[extension_of(path)]
    if reader == "json" and _has_record_per_line(path):
        yield from _parse_lines(path, _read("text", path, scratch))
    else:
        for number, values in enumerate(_read(reader, path, scratch), 1):
            if reader in ("json", "parquet", "arrow"):
                values = {column: _without_nones(value) for column, value in values.items()}
            yield DataRecord(values, f"{'line' if reader == 'text' else 'record'} {number}")


def _read_compressed(path: Path, scratch: Path) -> Iterator[DataRecord]:
    """Unpack a file, and read the records of what was in it. Errors name the file as it is.

    Raises:
        UserError: it cannot be unpacked, or read.
    """
    import fsspec

    plain = scratch / path.with_suffix("").name
    try:
        with fsspec.open(path, "rb", compression="infer") as packed, plain.open("wb") as out:
            shutil.copyfileobj(packed, out, 1 << 20)
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
        plain.unlink(missing_ok=True)
        raise UserError(f"{path} cannot be unpacked: {error}.") from error
    try:
        yield from read_records(plain, scratch)
    except UserError as error:
        raise UserError(error.as_written.replace(str(plain), str(path))) from error
    finally:
        plain.unlink(missing_ok=True)


def _without_nones(value: Any) -> Any:
    """Return ``value`` without the keys inside it whose values are None."""
    if isinstance(value, dict):
        return {key: _without_nones(item) for key, item in value.items() if item is not None}
    return [_without_nones(item) for item in value] if isinstance(value, list) else value


def _read(reader: str, path: Path, scratch: Path) -> Iterator[dict[str, Any]]:
    if path.stat().st_size == 0:  # which some of the readers take for an error
        return
    count = 0
    try:
        for batch in _open_stream(reader, path, scratch).iter(batch_size=RECORDS_PER_READ):
            columns = list(batch)
            for values in zip(*batch.values(), strict=True):
                yield dict(zip(columns, values, strict=True))
                count += 1
    except (ValueError, OSError) as error:  # pyarrow's and pandas' errors are ValueErrors
        raise UserError(_what_is_wrong(reader, path, count, error)) from error


def _what_is_wrong(reader: str, path: Path, count: int, error: Exception) -> str:
    """Say where a file is broken, as well as can be found out, after ``count`` good records."""
    if reader not in ("parquet", "arrow") and (number := _line_not_text(path)) is not None:
        return f"{path}, line {number}, is not UTF-8 text: {error}."
    if reader == "json":
        try:
            json.loads(path.read_bytes())
        except json.JSONDecodeError as broken:
            return f"{path}, line {broken.lineno} is not JSON ({broken.msg} at column {broken.colno})."
        except (ValueError, RecursionError):
            pass  # the reader's own words will do
    return f"{path} cannot be read{f' after record {count:,}' if count else ''}: {error}"


def _line_not_text(path: Path) -> int | None:
    """Return the number of the first line that is not UTF-8."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return None


def _open_stream(reader: str, path: Path, scratch: Path) -> Any:
    """Return a streaming ``datasets`` dataset over one file."""
    import datasets  # not at the top: 90 MB and a second that runs without data files need not pay

    def load(**options: Any) -> Any:
        pattern = glob.escape(str(path))
        return datasets.load_dataset(
            reader, data_files=[pattern], split="train", streaming=True, cache_dir=str(scratch), **options
        )

    if reader == "text":
        return load(keep_linebreaks=True, encoding="utf-8-sig")
    if reader == "parquet":
        return load(batch_size=RECORDS_PER_READ)
    if reader == "arrow":
        return load()
    if reader == "csv":
        # Only columns known by name are read as strings; left to guess, pandas would turn 007 into 7, NA into nothing.
        first: dict[str, Any] = next(iter(load(keep_default_na=False, chunksize=1)), {})
        strings = datasets.Features({column: datasets.Value("string") for column in first})
        return load(features=strings, keep_default_na=False, chunksize=RECORDS_PER_READ)
    _check_json_start(path)
    try:
        # Otherwise chats with columns such as id, source, model are taken for logs of coding agents.
        return load(parse_agent_traces=False)
    except TypeError:  # datasets 4 does not know the option, nor the logs
        return load()


def _has_record_per_line(path: Path) -> bool:
    """Return whether this is JSON lines, which also occur as ``.json``, as opposed to one value over many lines."""
    if path.suffix.lower() == ".jsonl":
        return True
    with path.open("rb") as file:
        if not file.read(1 << 12).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
            return False
        file.seek(0)
        first = file.readline().removeprefix(b"\xef\xbb\xbf")
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return False
    return True


def _parse_lines(path: Path, lines: Iterator[dict[str, Any]]) -> Iterator[DataRecord]:
    """Parse the objects of a JSON-lines file.

    ``datasets`` has a reader for these too, which makes one table of them: it refuses a column that first
    appears after 10 MiB, gives every record the keys of all others, and does not say which line is broken.
    """
    for number, line in enumerate((line["text"] for line in lines), 1):
        if not line.strip():
            continue
        shown = line.strip() if len(line) < 80 else line.strip()[:80] + "..."
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(
                f"{path}, line {number} is not JSON ({error.msg} at column {error.colno}): {shown}"
            ) from error
        except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of brackets
            raise UserError(f"{path}, line {number} is JSON that no reader takes ({error}): {shown}") from error
        if not isinstance(record, dict):
            raise UserError(f'{path}, line {number}: expected an object such as {{"text": "..."}}, found {shown}')
        if "\\ud" in line.lower():  # may hold half a surrogate pair, which tokenizers do not take
            record = json.loads(json.dumps(record, ensure_ascii=False).encode(errors="replace"))
        yield DataRecord(record, f"line {number}")


def _check_json_start(path: Path) -> None:
    """Refuse what is not objects: pyarrow's JSON reader crashes the process on a file that starts with ``null``."""
    with path.open("rb") as file:
        start = file.read(1 << 12).removeprefix(b"\xef\xbb\xbf").lstrip()
    if start and not start.startswith((b"{", b"[")):
        found = start[:40].decode(errors="replace")
        raise UserError(f'{path}, line 1: expected JSON objects such as {{"text": "..."}}, found {found!r}.')
