"""Read the records of data files: a value means what its format and its column say, and nothing is guessed.

JSON is parsed by the letter, record by record; fields of CSV are text; tables (Parquet, Arrow) have the types that they
say. Files are read as streams, compressed ones too, except for a ``.json`` file that is one value. What cannot be read
is a ``UserError`` that names the file and the line.
"""

import bz2
import contextlib
import csv
import gzip
import io
import itertools
import json
import lzma
import os
import shlex
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple

from common.errors import UserError
from common.files import check_regular
from common.hardware.machine import memory_available_bytes
from common.limits import LimitExceeded, limited
from common.units import format_bytes

RECORDS_PER_READ = 256  # Rows of a table that are converted at once
TEXT_BYTES = 64 << 20  # Bytes of a text file that make a record, with the rest of their last line
LINE_BYTES = 256 << 20  # Most bytes of a line, and of a record of CSV
_LONG_LINE = 1 << 20  # Bytes of a line whose value is watched while it is parsed
_VALUE_MEMORY = 4 << 30  # Memory that a line, or some rows of a table, may take when it is parsed
_JSON_FACTOR = 4  # Memory that a file of one JSON value takes, next to its size

_BOM = b"\xef\xbb\xbf"


class DataRecord(NamedTuple):
    """One record of a data file."""

    values: dict[str, Any]  # Values by column
    file: Path
    position: str  # Where it is in the file: `line 7`, or `record 7` where there are no lines
    # Values of columns whose layout --columns fills with others
    replaced: Mapping[str, Any] = MappingProxyType({})

    @property
    def where(self) -> str:
        """File and line, for messages."""
        return f"{self.file}, {self.position}"


class ReadPosition:
    """How far files are read that are read one after the other."""

    def __init__(self) -> None:
        self._before = 0
        self._file: IO[bytes] | None = None

    @contextlib.contextmanager
    def within(self, path: Path, file: IO[bytes]) -> Iterator[None]:
        """Follow ``file``, which reads ``path``, as long as this context is open."""
        self._file = file
        yield
        self._before = self._before + path.stat().st_size
        self._file = None

    @property
    def bytes(self) -> int:
        """Bytes that are read, as they are stored; without those of a file that does not tell."""
        if self._file is not None:
            with contextlib.suppress(OSError, ValueError):
                return self._before + os.lseek(self._file.fileno(), 0, os.SEEK_CUR)
        return self._before


def require_text(record: Mapping[str, Any], field: str, where: str) -> str:
    """Return a field that must be text; empty if it is missing or null. ``where`` is file and line, for messages."""
    value = record.get(field)
    if value is None or isinstance(value, str):
        return value or ""
    kinds = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    kind = kinds.get(type(value), f"of type {type(value).__name__}")
    shown = str(value)[:80]
    advice = (
        f' Write "{json.dumps(value)}", in quotes, if it is text.' if isinstance(value, int | float) else ""
    )
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
    """Parse JSON in which each key occurs once, and each character is whole."""
    value = json.loads(text, object_pairs_hook=_unique)
    if "\\ud" in text.lower():  # half a surrogate pair is neither UTF-8, nor does a tokenizer take it
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])[1:-1]
            raise ValueError(f"{half} is half of a surrogate pair, and no character") from error
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return values


def extension_of(path: Path) -> str:
    """Return the extension that says what a data file holds: ``.jsonl`` of ``chats.jsonl.gz``."""
    compressed = path.suffix.lower() in COMPRESSIONS
    return (path.with_suffix("") if compressed else path).suffix.lower()


def read_records(path: Path, position: ReadPosition | None = None) -> Iterator[DataRecord]:
    """Read the records of one file, in order. A text file is one record, ``text``; a long one has one per 64 MiB.

    Blank lines between records hold none. Every value of a CSV file is a string, exactly as written, line breaks
    included. In tables all records have the keys of all others, within their values too: those without a value are
    taken away there. In JSON, null is what was written.
    """
    after = ""
    try:
        check_regular(path)
        if path.stat().st_size == 0:  # no table, but no error either
            return
        with (
            COMPRESSIONS.get(path.suffix.lower(), Path.open)(path, "rb") as file,
            (position or ReadPosition()).within(path, file),
        ):
            for which, value in READERS[extension_of(path)](path, file):
                if not isinstance(value, dict):
                    shown = _shown(json.dumps(value))
                    raise UserError(
                        f'{path}, {which}: expected an object such as {{"text": "..."}}, found {shown}'
                    )
                yield DataRecord(value, path, which)
                after = f" after {which}"
    except OSError as error:
        raise UserError(f"{path} cannot be read{after}: {error.strerror or error}") from error
    except LimitExceeded as error:
        raise UserError(f"{path} cannot be read{after}: what follows {error}.") from error
    except (ValueError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"{path} cannot be read{after}: {error}") from error


def _open_zstandard(path: Path, mode: str) -> IO[bytes]:
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))


def _decoded(path: Path, data: bytes, first_line: int = 1) -> str:
    try:
        text = (data.removeprefix(_BOM) if first_line == 1 else data).decode()
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        raise UserError(f"{path}, line {line}, is not UTF-8 text: {error}.") from error
    if (start := data.find(b"\0")) >= 0:
        line = first_line + data.count(b"\n", 0, start)
        byte = start - data.rfind(b"\n", 0, start)
        raise UserError(
            f"{path}, line {line}, has a NUL at its byte {byte:,}, as a power cut leaves them. "
            f"Restore the file from a copy, or remove all NULs: tr -d '\\000' < {shlex.quote(str(path))} > NEW."
        )
    return text


def _lines(path: Path, file: IO[bytes], first: int = 1) -> Iterator[str]:
    """Return the lines of a file from line ``first`` on, with their line breaks; only a line feed ends one."""
    number = first
    while line := _line(path, file, number):
        yield _decoded(path, line, number)
        number += 1


def _line(path: Path, file: IO[bytes], number: int) -> bytes:
    """Read the rest of a line."""
    line = file.readline(LINE_BYTES + 1)
    if len(line) > LINE_BYTES:
        raise UserError(
            f"{path}, line {number}, has more than {format_bytes(LINE_BYTES)}, the most for one line: make several "
            "records of it."
        )
    return line


def _read_text(path: Path, file: IO[bytes]) -> Iterator[tuple[str, Any]]:
    line = 1
    while data := file.read(TEXT_BYTES):
        data += _line(path, file, line + data.count(b"\n"))
        yield f"line {line}", {"text": _decoded(path, data, line)}
        line += data.count(b"\n")


def _read_json_lines(path: Path, file: IO[bytes]) -> Iterator[tuple[str, Any]]:
    yield from _json_records(path, _lines(path, file))


def _json_records(path: Path, lines: Iterable[str]) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(lines, 1):
        if not line.isspace():
            yield f"line {number}", _parsed(path, line, number)


def _read_json(path: Path, file: IO[bytes]) -> Iterator[tuple[str, Any]]:
    """Read the records of a list, an object alone, or lines as of ``.jsonl``, if the first line is whole."""
    first = file.readline(LINE_BYTES)
    is_line = False
    if not first.removeprefix(_BOM).lstrip().startswith(b"["):
        with contextlib.suppress(ValueError, RecursionError):
            json.loads(first)
            is_line = True
    if is_line:
        yield from _json_records(path, itertools.chain([_decoded(path, first)], _lines(path, file, 2)))
    elif (text := _decoded(path, first + _rest(path, file))).strip():
        value = _parsed(path, text)
        for number, record in enumerate(value if isinstance(value, list) else [value], 1):
            yield f"record {number}", record


def _rest(path: Path, file: IO[bytes]) -> bytes:
    """Read the rest of a file that is one JSON value, as long as it fits into memory."""
    most = memory_available_bytes() // _JSON_FACTOR
    parts: list[bytes] = []
    while part := file.read(1 << 24):
        parts.append(part)
        most -= len(part)
        if most < 0:
            raise UserError(
                f"{path} is one JSON value, which has to fit into memory {_JSON_FACTOR} times, and does not. Make it "
                f"a .jsonl file, with one record in each line: jq -c '.[]' FILE.json > FILE.jsonl"
            )
    return b"".join(parts)


def _parsed(path: Path, text: str, line: int | None = None) -> Any:
    """Return the value of a line of JSON; without a number, of all lines."""
    if line is not None:
        text = text.rstrip()  # an error at the end of a line is in that line, and not in the next one
    try:
        if len(text) < _LONG_LINE:
            return parse_json(text)
        with limited(None, memory_available_bytes() if line is None else _VALUE_MEMORY):
            return parse_json(text)
    except LimitExceeded as error:
        raise UserError(f"{path}{f', line {line}' if line else ''}, {error} when it is parsed.") from error
    except json.JSONDecodeError as error:
        line = line or error.lineno
        reason = f"{error.msg} at column {error.colno}"
        text = text[error.pos - error.colno + 1 :]
    except (ValueError, RecursionError) as error:
        reason = str(error)
    raise UserError(f"{path}{f', line {line}' if line else ''} is not JSON ({reason}): {_shown(text)}")


def _shown(text: str) -> str:
    text = text.strip().split("\n")[0]
    return text if len(text) < 80 else text[:80] + "..."


def _read_csv(path: Path, file: IO[bytes]) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(sys.maxsize)
    delimiter = "\t" if extension_of(path) == ".tsv" else ","
    names: list[str] = []
    line, row_characters = 1, 0

    def counted() -> Iterator[str]:
        nonlocal row_characters
        for text in _lines(path, file):
            row_characters += len(text)
            if row_characters > LINE_BYTES:
                raise UserError(
                    f"{path}, line {line}: this row has more than {format_bytes(LINE_BYTES)}, as if a "
                    "quotation mark is not closed."
                )
            yield text

    rows = csv.reader(counted(), delimiter=delimiter, strict=True)
    try:
        for row in rows:
            if row and not names:
                names = row
                _check_names(path, names)
            elif row and len(row) != len(names):
                raise UserError(
                    f"{path}, line {line} has {len(row)} fields, and the header names {len(names)} "
                    f"({', '.join(names)}). Quote a text that holds a {'tab' if delimiter == chr(9) else 'comma'}."
                )
            elif row:
                yield f"line {line}", dict(zip(names, row, strict=True))
            line, row_characters = rows.line_num + 1, 0
    except csv.Error as error:
        raise UserError(
            f"{path}, line {line}: a field is not quoted as CSV has it ({error}). Quote a text that holds quotes "
            'or line breaks, and double the quotes within: "She said ""yes""."'
        ) from error


def _check_names(path: Path, names: Sequence[str]) -> None:
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise UserError(f"{path} has more than one column {repeated[0]!r}: {', '.join(names)}.")


def _read_table(path: Path, file: IO[bytes]) -> Iterator[tuple[str, Any]]:
    import pyarrow

    number = 0
    try:
        batches = iter(_table_batches(path, file))
        while (batch := _next_batch(batches)) is not None:
            _check_names(path, batch.schema.names)
            classes = _classes(batch.schema)
            for start in range(0, len(batch), RECORDS_PER_READ):
                with limited(None, _VALUE_MEMORY):
                    rows = batch.slice(start, RECORDS_PER_READ).to_pylist()
                for row in rows:
                    number += 1
                    values = {column.name: _value(row[column.name], column.type) for column in batch.schema}
                    values |= {name: None for name in classes if values.get(name) == -1}
                    yield f"record {number}", values
    except (pyarrow.ArrowException, RecursionError, OverflowError) as error:  # dates beyond what Python has
        raise ValueError(str(error)) from error


def _classes(schema: Any) -> list[str]:
    """Return the columns with numbers of classes, where -1 says that there is none (``datasets.ClassLabel``)."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"].items()
    except (LookupError, TypeError, ValueError, AttributeError):  # other tools write no such thing
        return []
    return [name for name, kind in features if isinstance(kind, dict) and kind.get("_type") == "ClassLabel"]


def _next_batch(batches: Iterator[Any]) -> Any:
    with limited(None, _VALUE_MEMORY):
        return next(batches, None)


def _table_batches(path: Path, file: IO[bytes]) -> Iterable[Any]:
    import pyarrow
    import pyarrow.parquet as parquet

    if extension_of(path) == ".parquet":
        batches: Iterable[Any] = parquet.ParquetFile(file, buffer_size=1 << 20).iter_batches(RECORDS_PER_READ)
        return batches
    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    if not is_file:
        return _stream_batches(file)
    whole = pyarrow.ipc.open_file(file)
    return map(whole.get_batch, range(whole.num_record_batches))


class _LastBytes:
    """A file that keeps the last 4 bytes of its last read, and of the read before."""

    closed = False

    def __init__(self, file: IO[bytes]):
        self._file = file
        self.last = b""

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.last = self.last[-4:] + data[-4:]
        return data


def _stream_batches(file: IO[bytes]) -> Iterator[Any]:
    """Return the batches of an Arrow stream; pyarrow takes the end of the file, or zeros, for the stream's end too."""
    import pyarrow

    continuation = b"\xff" * 4
    zero = b"\0" * 4
    is_marked = file.read(4) == continuation  # not so before Arrow 0.15
    file.seek(0)
    reader = _LastBytes(file)
    yield from pyarrow.ipc.open_stream(reader)
    if len(reader.last) < 8 or reader.last[-4:] != zero or (is_marked and reader.last[:4] != continuation):
        raise ValueError("the Arrow stream has no end marker, as if the file was cut: write it again")
    if file.read(1):
        raise ValueError("there are bytes after the end of the Arrow stream: write the file again")


def _value(value: Any, kind: Any) -> Any:
    """Return a value of an Arrow type: JSON is parsed, maps are objects, and structs lose the keys without a value."""
    import pyarrow

    if pyarrow.types.is_dictionary(kind):
        return _value(value, kind.value_type)
    if isinstance(value, list) and pyarrow.types.is_map(kind):  # pairs, as a map may repeat a key
        return _unique([(key, _value(item, kind.item_type)) for key, item in value])
    if isinstance(value, list) and hasattr(kind, "value_type"):
        return [_value(item, kind.value_type) for item in value]
    if isinstance(value, dict) and pyarrow.types.is_struct(kind):
        return {
            part.name: _value(value[part.name], part.type) for part in kind if value[part.name] is not None
        }
    return parse_json(value) if isinstance(value, str) and isinstance(kind, pyarrow.JsonType) else value


# Functions that read a data file, by its extension: positions and values, which records must have as objects.
READERS: dict[str, Callable[[Path, IO[bytes]], Iterator[tuple[str, Any]]]] = {
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
