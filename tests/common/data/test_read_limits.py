"""A data file is read up to a bound: the error names the file and the line that passes it."""

import gzip
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from common.data import read
from common.data.files import find_files
from common.data.read import read_records
from common.errors import UserError

KIB = 1 << 10
LINE = b'{"text": "hello"}\n'


@pytest.fixture
def short_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "LINE_BYTES", 64 * KIB)
    monkeypatch.setattr(read, "TEXT_BYTES", 16 * KIB)


@pytest.mark.parametrize(
    "kind", [".jsonl", ".json", ".jsonl.gz", ".json.bz2", ".jsonl.xz", ".csv", ".tsv.gz", ".txt"]
)
@pytest.mark.usefixtures("short_lines")
def test_an_endless_line_is_named(tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"data{kind}"
    content = (LINE if ".json" in kind else b"text\n") * 2 + b'{"text": "' + b"a" * 100 * KIB + b'"}\n'
    with read.COMPRESSIONS.get(file.suffix, open)(file, "wb") as out:
        out.write(content)
    with pytest.raises(UserError, match=r"line 3\b.* more than 64 KiB") as caught:
        list(read_records(file))
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    "row", ['"' + "a\n" * 50 * KIB, ",".join(['"a\n"'] * 50 * KIB)], ids=["field", "fields"]
)
@pytest.mark.usefixtures("short_lines")
def test_an_endless_row_of_csv_is_named(tmp_path: Path, row: str) -> None:
    file = tmp_path / "data.csv"
    file.write_text(f"text\nhello\n{row}")
    with pytest.raises(UserError, match=r"data\.csv, line 3: this row has more than 64 KiB"):
        list(read_records(file))


def test_many_rows_of_csv_are_no_long_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "LINE_BYTES", KIB)
    file = tmp_path / "data.csv"
    file.write_text("text\n" + '"two\nlines"\n' * KIB)
    assert len(list(read_records(file))) == KIB


def test_a_json_value_larger_than_memory_is_refused_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "data.json.gz"
    with gzip.open(file, "wb") as out:
        out.write(b"[\n" + b'{"text": "a"},\n' * 10 * KIB + b'{"text": "b"}]\n')
    assert len(list(read_records(file))) == 10 * KIB + 1
    monkeypatch.setattr(read, "memory_available_bytes", lambda: 100 * KIB)
    with pytest.raises(UserError, match=r"is one JSON value, .* jq -c"):
        list(read_records(file))


def test_a_line_that_becomes_much_in_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "data.jsonl"
    file.write_bytes(LINE + b'{"text": "a", "more": [' + b"1," * 600 * KIB + b"{}]}\n")
    monkeypatch.setattr(read, "_VALUE_MEMORY", 64 << 20)
    assert len(list(read_records(file))) == 2
    parse = read.parse_json
    monkeypatch.setattr(read, "parse_json", lambda text: parse(text) | {"more": bytes(len(text) * 100)})
    with pytest.raises(UserError, match=r"line 2, takes more than 64 MiB of memory"):
        list(read_records(file))


def test_rows_of_a_table_that_become_much_in_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dictionary says a text once for all rows."""
    monkeypatch.setattr(read, "_VALUE_MEMORY", 128 << 20)
    file = tmp_path / "data.parquet"
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 1_000, pa.int32()), pa.array(["a" * (4 << 20)]))
    pq.write_table(pa.table({"text": texts}), file)
    assert file.stat().st_size < KIB * KIB
    with pytest.raises(
        UserError, match=r"data\.parquet cannot be read: what follows takes more than 128 MiB"
    ):
        list(read_records(file))


@pytest.mark.parametrize("kind", [".jsonl", ".txt", ".parquet", ".json.gz"])
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    pipe, device, folder = (tmp_path / f"{name}{kind}" for name in ("pipe", "device", "folder"))
    os.mkfifo(pipe)
    device.symlink_to("/dev/zero")
    folder.mkdir()
    for path in (pipe, device, folder):
        with pytest.raises(UserError, match=f"{path.name} cannot be read: it is not a regular file"):
            list(read_records(path))


@pytest.mark.parametrize(
    "content", ["[7]", "null", '{"_data_files": [1]}', '{"_data_files": 7}', "[" * 100_000]
)
def test_a_list_of_files_of_other_types_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "state.json").write_text(content)
    with pytest.raises(UserError, match=r"state\.json does not list the files of a data set"):
        find_files((str(tmp_path),))


def test_a_readme_of_any_size_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_bytes(LINE)
    with (tmp_path / "README.md").open("wb") as file:
        file.write(b"---\n")
        file.truncate(1 << 40)  # sparse
    assert find_files((str(tmp_path),)) == [tmp_path / "data.jsonl"]
