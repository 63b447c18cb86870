"""Read the records of data files: a value means what its format and its column say, and nothing is guessed.

JSON is parsed by the letter, record by record; fields of CSV are text; tables (Parquet, Arrow) have the types that they
say. Files are read as streams, compressed ones too. What needs a whole file in memory: a ``.json`` file that is one
list, and a line of a file of records. What cannot be read is a ``UserError`` that names the file and the line.
"""

import bz2
import codecs
import contextlib
import csv
import gzip
import io
import itertools
import json
import lzma
import math
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

from common.errors import UserError

RECORDS_PER_READ = 256  # Rows of a table that are converted at once
_LINE_BYTES = 1 << 16  # Number of bytes of a line of text that are read at once

_BOM = b"\xef\xbb\xbf"
_SPACE = re.compile(r"[ \t\r\n]*")


class DataRecord(NamedTuple):
    """One record of a data file."""

    values: dict[str, Any]  # Values by column
    position: str  # Where it is in the file: `line 7`, `line 7, record 2`, or `record 7` where there are no lines


def require_text(record: Mapping[str, Any], field: str, where: str) -> str:
    """Return a field that must be text; empty if it is missing or null. ``where`` is file and line, for messages."""
    value = record.get(field)
    if value is None or isinstance(value, str):
        return value or ""
    kinds = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    kind, shown = kinds.get(type(value), f"of type {type(value).__name__}"), str(value)[:80]
    advice = f' Write "{json.dumps(value)}", in quotes, if it is text.' if isinstance(value, int | float) else ""
    raise UserError(f"{where}: {field!r} is {kind}, where text is expected: {shown}.{advice}")


def structured(record: Mapping[str, Any], field: str, where: str) -> Any:
    """Return a field that holds a list or an object; text is parsed as JSON, which tables use for such values.

    Blank text is None. Text that begins as neither is returned as it is.
    """
    value = record.get(field)
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text[:1] not in ("[", "{"):
        return value if text else None
    try:
        return parse_json(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: {field!r} is text that is not JSON ({error}): {text[:80]}") from error


def parse_json(text: str) -> Any:
    """Parse JSON by the letter of its standard."""
    value = _JSON.decode(text)
    _check_characters(text, value)
    return value


def _check_characters(text: str, value: Any) -> None:
    """Refuse half surrogate pairs in ``value``, parsed from ``text``: neither UTF-8 nor tokenizers have them."""
    if "\\ud" in text.lower():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])[1:-1]
            raise ValueError(f"{half} is half of a surrogate pair, and no character") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return values


def _constant(name: str) -> float:
    raise ValueError(f"JSON has no {name}")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{digits} is too large a number")
    return value


_JSON = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_constant, parse_float=_finite)


def extension_of(path: Path) -> str:
    """Return the extension that says what a data file holds: ``.jsonl`` of ``chats.jsonl.gz``."""
    compressed = path.suffix.lower() in COMPRESSIONS
    return (path.with_suffix("") if compressed else path).suffix.lower()


def is_text_file(path: Path) -> bool:
    """Return whether a data file is one document, without records."""
    return extension_of(path) == ".txt"


def read_records(path: Path) -> Iterator[DataRecord]:
    """Read the records of one file, in order. A text file gives a record per line, line break included, as ``text``,
    and several of a long line.

    Blank lines between records hold none. Every value of a CSV file is a string, exactly as written, line breaks
    included. In tables all records have the keys of all others, within their values too: those without a value are
    taken away there. In JSON, null is what was written.
    """
    count = 0
    if path.stat().st_size == 0:  # no table, but no error either
        return
    try:
        with COMPRESSIONS.get(path.suffix.lower(), Path.open)(path, "rb") as file:
            for record in READERS[extension_of(path)](path, file):
                yield record
                count += 1
    except (ValueError, OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"{path} cannot be read{f' after record {count:,}' if count else ''}: {error}") from error


def _open_zstandard(path: Path, mode: str) -> IO[bytes]:
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))


def _lines(path: Path, file: Iterable[bytes]) -> Iterator[str]:
    """Return the lines of a file, with their line breaks; only a line feed ends one."""
    return map(partial(_decoded, path), file, itertools.count(1))


def _decoded(path: Path, data: bytes, first_line: int = 1) -> str:
    try:
        return (data.removeprefix(_BOM) if first_line == 1 else data).decode()
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        raise UserError(f"{path}, line {line}, is not UTF-8 text: {error}.") from error


def _read_text(path: Path, file: IO[bytes]) -> Iterator[DataRecord]:
    number, decoder = 1, codecs.getincrementaldecoder("utf-8")()
    data = file.readline(_LINE_BYTES).removeprefix(_BOM)
    while data:
        following = file.readline(_LINE_BYTES)
        try:
            yield DataRecord({"text": decoder.decode(data, final=not following)}, f"line {number}")
        except UnicodeDecodeError as error:
            raise UserError(f"{path}, line {number}, is not UTF-8 text: {error}.") from error
        number += data.endswith(b"\n")
        data = following


def _read_json_lines(path: Path, file: Iterable[bytes]) -> Iterator[DataRecord]:
    for number, line in enumerate(_lines(path, file), 1):
        if not line.isspace():
            try:
                value = parse_json(line)
            except (ValueError, RecursionError) as error:
                raise _not_json(path, number, error, line) from error
            del line  # a long text is held once
            yield _record(path, f"line {number}", value)


def _read_json(path: Path, file: IO[bytes]) -> Iterator[DataRecord]:
    head: list[bytes] = []
    for line in file:
        head.append(line)
        if first := line.removeprefix(_BOM).strip():
            break
    else:
        return
    lines, is_line = itertools.chain(head, file), False
    if not first.startswith(b"["):
        with contextlib.suppress(ValueError, RecursionError):
            is_line = parse_json(first.decode()) is not None
    if is_line:
        yield from _read_json_lines(path, lines)
        return
    text = _decoded(path, b"".join(lines))
    for number, (row, value) in enumerate(_values(path, text), 1):
        yield _record(path, f"line {row}, record {number}", value)


def _values(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    """Return the values of a JSON list, or the value that is no list, each with its line; one is parsed at a time."""
    at, line, counted = _after_space(text, 0), 1, 0
    is_list = text.startswith("[", at)
    at = _after_space(text, at + 1) if is_list else at
    more = at < len(text) and not (is_list and text.startswith("]", at))
    try:
        while more:
            line, counted = line + text.count("\n", counted, at), at
            value, stop = _JSON.raw_decode(text, at)
            _check_characters(text[at:stop], value)
            yield line, value
            at = _after_space(text, stop)
            more = is_list and text.startswith(",", at)
            at = _after_space(text, at + 1) if more else at
        if is_list and not text.startswith("]", at):
            raise json.JSONDecodeError("Expecting ',' or ']'", text, at)
        at = _after_space(text, at + is_list)
        if at < len(text):
            raise json.JSONDecodeError("Extra data", text, at)
    except json.JSONDecodeError as error:
        raise _not_json(path, error.lineno, error, text.split("\n", error.lineno)[error.lineno - 1]) from error
    except (ValueError, RecursionError) as error:
        raise _not_json(path, line, error, text[at : at + 200]) from error


def _after_space(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]


def _record(path: Path, position: str, value: Any) -> DataRecord:
    if not isinstance(value, dict):
        shown = _shown(json.dumps(value))
        raise UserError(f'{path}, {position}: expected an object such as {{"text": "..."}}, found {shown}')
    return DataRecord(value, position)


def _not_json(path: Path, line: int, error: Exception, text: str) -> UserError:
    what = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
    return UserError(f"{path}, line {line} is not JSON ({what}): {_shown(text)}")


def _shown(text: str) -> str:
    text = text.strip()
    return text if len(text) < 80 else text[:80] + "..."


def _read_csv(path: Path, file: IO[bytes]) -> Iterator[DataRecord]:
    csv.field_size_limit(sys.maxsize)
    delimiter = "\t" if extension_of(path) == ".tsv" else ","
    rows = csv.reader(_lines(path, file), delimiter=delimiter, strict=True)
    names: list[str] = []
    while True:
        line = rows.line_num + 1
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise UserError(
                f"{path}, line {line}: a field is not quoted as CSV has it ({error}). Quote a text that holds quotes "
                'or line breaks, and double the quotes within: "She said ""yes""."'
            ) from error
        if row is None:
            return
        if not row:
            continue
        if not names:
            names = row
            _check_names(path, names)
        elif len(row) != len(names):
            raise UserError(
                f"{path}, line {line} has {len(row)} fields, and the header names {len(names)} ({', '.join(names)}). "
                f"Quote a text that holds a {'tab' if delimiter == chr(9) else 'comma'}."
            )
        else:
            yield DataRecord(dict(zip(names, row, strict=True)), f"line {line}")


def _check_names(path: Path, names: Sequence[str]) -> None:
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise UserError(f"{path} has more than one column {repeated[0]!r}: {', '.join(names)}.")


def _read_table(path: Path, file: IO[bytes]) -> Iterator[DataRecord]:
    import pyarrow

    number = 0
    try:
        for batch in _table_batches(path, file):
            _check_names(path, batch.schema.names)
            for start in range(0, len(batch), RECORDS_PER_READ):
                for row in batch.slice(start, RECORDS_PER_READ).to_pylist():
                    number += 1
                    values = {column.name: _value(row[column.name], column.type) for column in batch.schema}
                    yield DataRecord(values, f"record {number}")
    except (pyarrow.ArrowException, RecursionError, OverflowError) as error:  # dates beyond what Python has
        raise ValueError(str(error)) from error


def _table_batches(path: Path, file: IO[bytes]) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet as parquet

    if extension_of(path) == ".parquet":
        yield from parquet.ParquetFile(file, buffer_size=1 << 20).iter_batches(RECORDS_PER_READ)
        return
    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    whole = pyarrow.ipc.open_file(file) if is_file else None
    yield from pyarrow.ipc.open_stream(file) if whole is None else map(whole.get_batch, range(whole.num_record_batches))


def _value(value: Any, kind: Any) -> Any:
    """Return a value of an Arrow type: JSON is parsed, and objects lose the keys that have no value."""
    import pyarrow

    if isinstance(value, list) and hasattr(kind, "value_type"):
        return [_value(item, kind.value_type) for item in value]
    if isinstance(value, dict) and pyarrow.types.is_struct(kind):
        return {part.name: _value(value[part.name], part.type) for part in kind if value[part.name] is not None}
    return parse_json(value) if isinstance(value, str) and isinstance(kind, pyarrow.JsonType) else value


# Functions that read a data file, by its extension.
READERS: dict[str, Callable[[Path, IO[bytes]], Iterator[DataRecord]]] = {
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_table,
    ".txt": _read_text,
    ".arrow": _read_table,  # as save_to_disk of datasets leaves them in a directory
}

# Functions that open a compressed file, by the extension after the data file's.
COMPRESSIONS: dict[str, Callable[[Path, str], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstandard,
}

KNOWN_EXTENSIONS = f"{', '.join(READERS)} (and {', '.join(COMPRESSIONS)} after them)"
