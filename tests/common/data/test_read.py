"""Reading: a value means what its format and column say, in every format, and what cannot be read is named."""

import bz2
import csv
import datetime
import gzip
import io
import json
import lzma
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.data.read import read_records, require_text
from common.errors import UserError
from tests.common.data.conftest import write_records

RECORDS = [{"text": f"Text {i}, \"quoted\"\nand 'broken'", "more": str(i)} for i in range(10)]
PACKERS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress,
           ".zst": lambda data: pa.Codec("zstd").compress(data, asbytes=True)}  # fmt: skip
of_any_file = settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def read(path: Path) -> list[dict[str, Any]]:
    return [record.values for record in read_records(path)]


def written(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def test_a_missing_class_is_no_class(tmp_path: Path) -> None:
    """``datasets`` writes -1 for it, as in SNLI; elsewhere -1 is a number."""
    values = {"text": ["a", "b", "c"], "label": [0, -1, 1], "score": [0, -1, 1]}
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["up", "down"]),
            "score": datasets.Value("int64"),
        }
    )
    data = datasets.Dataset.from_dict(values, features=features)
    data.to_parquet(tmp_path / "a.parquet")
    data.save_to_disk(tmp_path / "saved")
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    for file in (tmp_path / "a.parquet", arrow):
        assert [(row["label"], row["score"]) for row in read(file)] == [(0, 0), (None, -1), (1, 1)]
    table = pa.table(values)
    for written in (b"{", b"[]", b'{"info": {"features": {"label": ["ClassLabel"]}}}'):
        pq.write_table(table.replace_schema_metadata({b"huggingface": written}), tmp_path / "a.parquet")
        assert [row["label"] for row in read(tmp_path / "a.parquet")] == [0, -1, 1]


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "odd [1]*?.jsonl", "o::d [a-z].csv"]
)
def test_formats(tmp_path: Path, name: str) -> None:
    write_records(tmp_path / name, RECORDS)
    assert read(tmp_path / name) == RECORDS
    assert os.listdir(tmp_path) == [name], "something was left behind"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@of_any_file
@given(
    st.lists(st.dictionaries(st.text(max_size=5), json_values, max_size=4), max_size=4),
    st.sampled_from([None, 1]),
)
def test_any_records_are_the_same_in_every_form_of_json(
    tmp_path: Path, records: list[dict[str, Any]], indent: int | None
) -> None:
    lines = "".join(json.dumps(record) + "\n" for record in records)
    forms = {"list.json": json.dumps(records, indent=indent), "lines.json": lines, "a.jsonl": lines,
             "b.jsonl": "\n\r\n" + lines.replace("\n", "\r\n").rstrip()}  # fmt: skip
    if len(records) == 1:
        forms["one.json"] = "\ufeff" + json.dumps(records[0], indent=indent)
    for name, text in forms.items():
        assert read(written(tmp_path / name, text)) == records, name
        for extension, pack in PACKERS.items():
            packed = tmp_path / (name + extension)
            packed.write_bytes(pack(text.encode()))
            assert read(packed) == records, packed.name


@pytest.mark.parametrize("records", [
    [{"prompt": "2+2", "completion": "four"}, {"prompt": "1+1", "completion": 2}],
    [{"content": "a"}, {"content": [{"type": "text", "text": "a"}]}],
    [{"completion": "2024-01-01"}, {"completion": "2023-12-31"}],
    [{"completion": 2}, {"completion": 0.5}],
    [{"messages": [{"role": "user", "content": "a"}]}, {"messages": [{"role": "user", "content": "a", "weight": 0}]}],
    [{"arguments": {"time": "2025-08-01"}}, {"arguments": {"time": 1690876800}}],
])  # fmt: skip
def test_one_value_of_a_json_list_changes_no_other(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    write_records(tmp_path / "a.json", records)
    assert read(tmp_path / "a.json") == records
    assert str(read(tmp_path / "a.json")) == str(records), "2 is not 2.0"


cells = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)


@of_any_file
@given(st.data(), st.integers(1, 4), st.sampled_from([".csv", ".tsv"]), st.booleans())
def test_any_table_of_texts_is_the_same_in_csv(
    tmp_path: Path, data: st.DataObject, width: int, extension: str, bom: bool
) -> None:
    names = [
        f"{cell}{number}"
        for number, cell in enumerate(data.draw(st.lists(cells, min_size=width, max_size=width)))
    ]
    if not bom:
        names[0] = names[0].lstrip("\ufeff")
    rows = data.draw(st.lists(st.lists(cells, min_size=width, max_size=width), max_size=4))
    text = io.StringIO()
    writer = csv.writer(
        text,
        delimiter="," if extension == ".csv" else "\t",
        quoting=csv.QUOTE_ALL if bom else csv.QUOTE_MINIMAL,
    )
    writer.writerows([names, *rows])
    file = written(tmp_path / f"a{extension}", ("\ufeff" if bom else "") + text.getvalue())
    assert read(file) == [dict(zip(names, row, strict=True)) for row in rows]


def test_csv_values_are_texts_as_written(tmp_path: Path) -> None:
    text = 'label,date,text\r\n01,2024-01-01,"a\r\nb\nc"\r\nNA,1e3,\r\nnull,TRUE, x \r\n'
    assert [list(record.values()) for record in read(written(tmp_path / "a.csv", text))] == [
        ["01", "2024-01-01", "a\r\nb\nc"], ["NA", "1e3", ""], ["null", "TRUE", " x "],
    ]  # fmt: skip


def test_places_are_lines(tmp_path: Path) -> None:
    for name, text, expected in [
        ("a.csv", 'text\n"a\nb"\n\nc\n', ["line 2", "line 5"]),
        ("a.jsonl", '\n{"a": 1}\n\n{"a": 2}', ["line 2", "line 4"]),
        ("a.json", '[\n{"a": 1},\n\n{"a": 2}, {"a": 3}]', ["record 1", "record 2", "record 3"]),
        ("a.txt", "a\nb", ["line 1"]),
    ]:
        assert [record.position for record in read_records(written(tmp_path / name, text))] == expected


def test_types_of_tables_are_the_files(tmp_path: Path) -> None:
    """Timestamps and bytes stay what they are, and are refused as text; JSON is parsed; keys of others are no keys."""
    day = datetime.datetime(2024, 1, 1)
    parsed = pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"x": [1, null]}', None]))
    turns = pa.array([[{"role": "user", "name": None}], [{"role": "user", "name": "n"}]])
    nested = pa.ListArray.from_arrays(pa.array([0, 1, 2]), parsed)
    table = pa.table(
        {"day": [day, None], "raw": [b"a", b"b"], "json": parsed, "turns": turns, "nested": nested}
    )
    expected = [
        {
            "day": day,
            "raw": b"a",
            "json": {"x": [1, None]},
            "turns": [{"role": "user"}],
            "nested": [{"x": [1, None]}],
        },
        {"day": None, "raw": b"b", "json": None, "turns": [{"role": "user", "name": "n"}], "nested": [None]},
    ]
    pq.write_table(table, tmp_path / "a.parquet")
    for name, new in (("stream.arrow", pa.ipc.new_stream), ("file.arrow", pa.ipc.new_file)):
        with new(tmp_path / name, table.schema) as out:
            out.write_table(table)
    for name in ("a.parquet", "stream.arrow", "file.arrow"):
        record, _ = read_records(tmp_path / name)
        assert read(tmp_path / name) == expected, name
        for column, message in (("day", "of type datetime.*2024-01-01"), ("raw", "of type bytes")):
            with pytest.raises(UserError, match=f"{name}, record 1: '{column}' is {message}"):
                require_text(record.values, column, record.where)
    pq.write_table(pa.table({"day": pa.array([1 << 60], pa.timestamp("us"))}), tmp_path / "late.parquet")
    with pytest.raises(UserError, match=r"late.parquet cannot be read: date value out of range"):
        read(tmp_path / "late.parquet")


def test_a_long_text_file_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.data.read.TEXT_BYTES", 5)
    records = list(read_records(written(tmp_path / "text.txt", "\ufeffe\u0301\nlonger\n\nend")))
    assert [record.values["text"] for record in records] == ["e\u0301\n", "longer\n", "\nend"]
    assert [record.position for record in records] == ["line 1", "line 2", "line 3"]


def test_text_file_is_whole(tmp_path: Path) -> None:
    text = "One.\r\n\n\n  Two\tand\u2028three\x0c.\n\rno line break at the end"
    assert "".join(record["text"] for record in read(written(tmp_path / "a.txt", "\ufeff" + text))) == text


CUT = gzip.compress(b'{"text": "x"}\n' * 100, mtime=0)[:-20]


@pytest.mark.parametrize(("name", "content", "words"), [
    ("a.jsonl", b'{"text": "a"}\n{"text": "b}\n{"text": "c"}\n', ["line 2 is not JSON"]),
    ("a.jsonl", b'{"text": "a"}\nhello\n', ["line 2", "hello"]),
    ("a.jsonl", b'{"text": {"a": 1\n', ["line 1 is not JSON", 'at column 17): {"text": {"a": 1']),
    ("a.jsonl", b"hello\n", ["line 1", "hello"]),
    ("a.jsonl", b"null\n", ["line 1", "null"]),
    ("a.json", b"null\n", ["line 1", "null"]),
    ("a.jsonl", b'{"text": "a"}\n\n5\n', ["line 3", "found 5"]),
    ("a.jsonl", b'{"a": 1}{"a": 2}\n', ["line 1 is not JSON", "Extra data"]),
    ("a.json", b'["one", "two"]', ["record 1", 'found "one"']),
    ("a.json", b'{"text": "a"}\n{"text": \n', ["line 2"]),
    ("a.json", b'[{"text": "a"},\n {"text": ', ["line 2 is not JSON"]),
    ("a.json", b'[{"text": "a"},\n {"text": "b"},\n]', ["line 3 is not JSON"]),
    ("a.json", b'[{"text": "a"},\n {"text": "b"}\n', ["line 3 is not JSON"]),
    ("a.json", b'[{"text": "a"}]\n{"text": "b"}\n', ["line 2 is not JSON", "Extra data"]),
    ("a.json", b'[{"text": "a"},\n\n {"text": "b"} {}]', ["line 3 is not JSON"]),
    ("a.json", b'{"text": "a",\n "b": ', ["line 2 is not JSON"]),
    ("a.json", b'[{"text": "a"},\n {"text": "\xff"}]', ["line 2, is not UTF-8"]),
    ("a.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', ["line 2, is not UTF-8"]),
    ("a.jsonl", '{"text": "a"}\n'.encode("utf-16"), ["line 1, is not UTF-8"]),
    ("a.txt", b"one\ntwo\ncaf\xe9\n", ["line 3, is not UTF-8"]),
    ("a.csv", b"text\na\ncaf\xe9\n", ["line 3, is not UTF-8"]),
    ("a.txt", b"one\ntwo\0\0\0", ["line 2, has a NUL at its byte 4", "tr -d '\\000' < "]),
    ("a.txt", b"one\n\0\0\0", ["line 2, has a NUL at its byte 1"]),
    ("a.txt.gz", gzip.compress(b"one\n\0", mtime=0), ["line 2, has a NUL"]),
    ("a.csv", b"text\na\n\0\0", ["line 3, has a NUL at its byte 1"]),
    ("a.jsonl", b'{"text": "a"}\n\0\0\0', ["line 2, has a NUL at its byte 1"]),
    ("a.json", b'{"text": "a"}\n\0\0\0', ["line 2, has a NUL at its byte 1"]),
    ("a.jsonl", b'{"a": 1}\n{"a": 1, "a": 2}', ["line 2 is not JSON (the key 'a' occurs twice)"]),
    ("a.json", b'[{"a": 1},\n{"a": {"b": 1, "b": 2}}]', ["a.json is not JSON (the key 'b' occurs twice)"]),
    ("a.jsonl", rb'{"text": "a\ud83e b \ud83e\udd8a"}', ["line 1", r"\ud83e is half of a surrogate pair"]),
    ("a.json", b'[{"a": 1},\n' + rb'{"text": "a\uDD8a"}]', ["a.json", r"\udd8a is half of a surrogate pair"]),
    ("a.csv", b"prompt,completion\nWho?,Me.,\n", ["line 2 has 3 fields", "names 2 (prompt, completion)"]),
    ("a.csv", b"text\nfirst text, with a comma\nsecond\n", ["line 2 has 2 fields", "Quote a text"]),
    ("a.csv", b'text,b\n"1\n",2\n1\n', ["line 4 has 1 fields"]),
    ("a.tsv", b"text\tb\n1\t2\t3\n", ["line 2 has 3 fields", "a tab"]),
    ("a.csv", b"text,n,text\n1,2,3\n", ["more than one column 'text'"]),
    ("a.csv", b'text\na\n"never closed\nb\n', ["line 3", "not quoted as CSV has it"]),
    ("a.csv", b'text\n"closed" too early\n', ["line 2", "not quoted as CSV has it"]),
    ("a.csv", b"text\rone\rtwo\r", ["line 1", "not quoted"]),
    ("a.parquet", b"not parquet at all", ["cannot be read"]),
    ("a.arrow", b"not arrow at all", ["cannot be read"]),
    ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n{"text": \n', mtime=0), ["line 2 is not JSON"]),
    ("a.jsonl.gz", CUT, ["cannot be read"]),
    ("a.jsonl.bz2", b"no bz2", ["cannot be read"]),
    ("a.jsonl.xz", b"no xz", ["cannot be read"]),
    ("a.jsonl.zst", b"no zst", ["cannot be read"]),
])  # fmt: skip
def test_broken_files(tmp_path: Path, name: str, content: bytes, words: list[str], capfd: Any) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        read(tmp_path / name)
    assert all(word in str(error.value) for word in [str(tmp_path / name), *words]), error.value
    assert capfd.readouterr() == ("", ""), "more than the one message"
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("is_legacy", [False, True])  # of Arrow before 0.15
def test_an_arrow_stream_that_is_cut_or_has_a_tail_is_named(tmp_path: Path, is_legacy: bool) -> None:
    table, out, ends = pa.table({"text": [f"text {number}" for number in range(30)]}), io.BytesIO(), [0]
    options = pa.ipc.IpcWriteOptions(use_legacy_format=is_legacy)
    with pa.ipc.new_stream(out, table.schema, options=options) as writer:
        for batch in table.to_batches(10):
            writer.write_batch(batch)
            ends.append(out.tell())
    stream, file = out.getvalue(), tmp_path / "a.arrow"
    file.write_bytes(stream)
    assert read(file) == table.to_pylist()
    cut = [stream[:end] for end in ends[1:]]
    for content in (*cut, *(part + bytes(4096) for part in cut), stream + bytes(8), stream + stream):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"a\.arrow cannot be read after record .0: .*the Arrow stream"):
            read(file)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "a.arrow", "a.txt"])
def test_empty_file_has_no_records(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert read(tmp_path / name) == []


def test_long_fields_and_files_over_several_reads(tmp_path: Path) -> None:
    """Longer than csv's limit for fields, with a key that appears late, and more rows than are converted at once."""
    records: list[dict[str, Any]] = [{"text": "é" * 300_000}, *({"text": str(i)} for i in range(3000))]
    for name in ("a.csv", "a.jsonl", "a.parquet"):
        write_records(tmp_path / name, records)
        assert read(tmp_path / name) == records
    write_records(tmp_path / "a.jsonl", [*records, {"text": "", "extra": [1]}])
    assert read(tmp_path / "a.jsonl")[-1] == {"text": "", "extra": [1]}


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: tried.append(address))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: tried.append(args))
    for name in ("a.jsonl", "a.json", "a.csv", "a.parquet"):
        write_records(tmp_path / name, RECORDS)
        assert read(tmp_path / name) == RECORDS
    assert tried == []


def test_no_table_library_reads_text(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.json", "a.csv"):
        write_records(tmp_path / name, RECORDS)
    code = f"""
import sys
from pathlib import Path
from common.data.read import read_records
assert [len(list(read_records(path))) for path in Path({str(tmp_path)!r}).iterdir()] == [10] * 3
assert not {{"pandas", "pyarrow", "datasets"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=400)


def test_maps_of_tables_are_objects(tmp_path: Path) -> None:
    """As the arguments of a call, whose keys differ: pairs in Arrow, of which a template would write a list."""
    texts = pa.map_(pa.string(), pa.string())
    kind = pa.struct([("arguments", texts), ("names", pa.list_(texts))])
    values = {"arguments": [("city", "Rome"), ("day", None)], "names": [[("a", "b")], []]}
    expected = {"arguments": {"city": "Rome", "day": None}, "names": [{"a": "b"}, {}]}
    pq.write_table(pa.table({"call": pa.array([values], kind)}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == [{"call": expected}]
    pq.write_table(
        pa.table({"call": pa.array([[("a", "1"), ("a", "2")]], texts)}), tmp_path / "twice.parquet"
    )
    with pytest.raises(UserError, match=r"twice.parquet cannot be read: the key 'a' occurs twice"):
        read(tmp_path / "twice.parquet")
