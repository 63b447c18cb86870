"""Reading: every format gives the same records, and what cannot be read is named."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.data.files import find_files, read_records, reading
from common.errors import UserError
from tests.common.data.conftest import write_records

RECORDS = [{"text": f"Text {i}, \"quoted\"\nand 'broken'", "more": str(i)} for i in range(10)]


def read(path: Path) -> list[dict[str, Any]]:
    with reading(path.parent) as scratch:
        return [record.values for record in read_records(path, scratch)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "odd [1]*?.jsonl", "odd [a-z].csv"])
def test_formats(tmp_path: Path, name: str) -> None:
    write_records(tmp_path / name, RECORDS)
    assert read(tmp_path / name) == RECORDS
    assert os.listdir(tmp_path) == [name], "something was left behind"


def test_json_variants(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"text": "one\nobject"}, indent=2))
    assert read(path) == [{"text": "one\nobject"}]
    path.write_text(json.dumps(["one", "two"]))
    assert read(path) == [{"text": "one"}, {"text": "two"}]
    path.write_text("\ufeff" + '{"text": "a"}\n\n{"text": "b", "late": 1}\n')
    assert [record["text"] for record in read(path)] == ["a", "b"]


def test_json_lines_over_several_reads(tmp_path: Path) -> None:
    """More than one of the blocks that are read at a time, with a column that appears late."""
    records: list[dict[str, Any]] = [{"text": "é" * 1000 + str(i)} for i in range(6000)]
    records[-1]["extra"] = [1]
    write_records(tmp_path / "a.jsonl", records)
    assert read(tmp_path / "a.jsonl") == records


def test_chats_keep_their_own_keys(tmp_path: Path) -> None:
    chats = [
        {"id": "1", "source": "s", "model": "m", "system_prompt": "p", "messages": [{"role": "user", "content": "a"}]},
        {"id": "2", "source": "s", "model": "m", "system_prompt": "p",
         "messages": [{"role": "user", "content": [{"type": "text", "text": "b"}]}]},
    ]  # fmt: skip
    write_records(tmp_path / "a.jsonl", chats)
    assert [record["messages"] for record in read(tmp_path / "a.jsonl")] == [chat["messages"] for chat in chats]


def test_half_a_surrogate_pair_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(r'{"text": "a\ud83e b \ud83e\udd8a"}')
    assert read(tmp_path / "a.jsonl") == [{"text": "a? b 🦊"}]


def test_csv_values_are_strings(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,n\n007,1.50\nNA,\nnull,x\n")
    assert [list(record.values()) for record in read(tmp_path / "a.csv")] == [
        ["007", "1.50"],
        ["NA", ""],
        ["null", "x"],
    ]


def test_text_file_is_whole(tmp_path: Path) -> None:
    text = "One.\n\n\n  Two\tand\u2028three\x0c.\n\nno line break at the end"
    (tmp_path / "a.txt").write_text(text)
    assert "".join(record["text"] for record in read(tmp_path / "a.txt")) == text


def test_directories(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.TXT", "sub/c.csv", "README.md", ".hidden/x.jsonl", ".x.jsonl", "sub/deep/a.parquet"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    found = find_files((str(tmp_path), str(tmp_path / "b.jsonl")))
    assert [str(path.relative_to(tmp_path)) for path in found] == [
        "a.TXT", "b.jsonl", "sub/c.csv", "sub/deep/a.parquet", "b.jsonl",
    ]  # fmt: skip


def test_names_that_are_no_data(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text("x")
    (tmp_path / "notes.docx").write_text("x")
    (tmp_path / "empty").mkdir()
    for name, told in [
        ("chat.jsonl", ["chat.jsonl", "Did you mean 'chats.jsonl'?"]),
        ("nowhere/chat.jsonl", ["nowhere/chat.jsonl"]),
        ("notes.docx", ["notes.docx", ".jsonl, .json, .csv, .parquet, .txt"]),
        ("empty", ["empty", "nothing", ".jsonl"]),
    ]:
        with pytest.raises(UserError) as error:
            find_files((str(tmp_path / name),))
        assert all(word in str(error.value) for word in told), error.value
    (tmp_path / "empty" / "weights.bin").write_text("x")
    with pytest.raises(UserError, match=r"\.bin"):
        find_files((str(tmp_path / "empty"),))


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": "b}\n{"text": "c"}\n', ["line 2"]),
        ("a.jsonl", b'{"text": "a"}\nhello\n', ["line 2", "hello"]),
        ("a.jsonl", b"hello\n", ["line 1", "hello"]),
        ("a.jsonl", b"null\n", ["line 1", "null"]),
        ("a.json", b"null\n", ["line 1", "null"]),
        ("a.jsonl", b'{"text": "a"}\n\n5\n', ["line 3", "found 5"]),
        ("a.json", b'{"text": "a"}\n{"text": \n', ["line 2"]),
        ("a.json", b'[{"text": "a"},\n {"text": ', ["line 2 is not JSON"]),
        ("a.json", b'[{"text": "a"},\n\n {"text": "b"} {}]', ["line 3 is not JSON"]),
        ("a.json", b'{"text": "a",\n "b": ', ["line 2 is not JSON"]),
        ("a.json", b'[{"text": "a"},\n {"text": "\xff"}]', ["line 2, is not UTF-8"]),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', ["line 2, is not UTF-8"]),
        ("a.txt", b"one\ntwo\ncaf\xe9\n", ["line 3, is not UTF-8"]),
        ("a.csv", b"text\na\ncaf\xe9\n", ["line 3, is not UTF-8"]),
        ("a.csv", b"text,b\n1,2\n1,2,3,4\n", ["line 3"]),
        ("a.csv", b"\n", []),
        ("a.parquet", b"not parquet at all", []),
    ],
)
def test_broken_files(tmp_path: Path, name: str, content: bytes, told: list[str], capfd: Any) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        read(tmp_path / name)
    assert all(word in str(error.value) for word in [str(tmp_path / name), *told]), error.value
    assert capfd.readouterr() == ("", ""), "more than the one message"
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.txt"])
def test_empty_file_has_no_records(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert read(tmp_path / name) == []


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: tried.append(address))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: tried.append(args))
    for name in ("a.jsonl", "a.json", "a.csv", "a.parquet"):
        write_records(tmp_path / name, RECORDS)
        assert read(tmp_path / name) == RECORDS
    assert tried == []


def test_home_directory_stays_clean(tmp_path: Path) -> None:
    home, data = tmp_path / "home", tmp_path / "data"
    home.mkdir()
    data.mkdir()
    write_records(data / "a.jsonl", RECORDS)
    code = f"""
from pathlib import Path
from common.data.files import read_records, reading
with reading(Path({str(data)!r})) as scratch:
    assert len(list(read_records(Path({str(data / "a.jsonl")!r}), scratch))) == 10
"""
    keep = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "XDG_", "TRANSFORMERS_"))}
    subprocess.run([sys.executable, "-c", code], check=True, env={**keep, "HOME": str(home)}, timeout=400)
    assert [path for path in home.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("extension", ["gz", "bz2", "xz"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.txt", "a.json"])
def test_compressed_files_are_read_as_what_is_in_them(tmp_path: Path, name: str, extension: str) -> None:
    import fsspec

    content = {
        "a.jsonl": '{"text": "x"}\n{"text": "y"}\n', "a.csv": "text,n\nx,007\ny,NA\n",
        "a.txt": "x\ny\n", "a.json": '[{"text": "x"}, {"text": "y"}]',
    }[name]  # fmt: skip
    plain, packed = tmp_path / name, tmp_path / f"{name}.{extension}"
    plain.write_text(content)
    with fsspec.open(packed, "wt", compression="infer") as file:
        file.write(content)
    assert find_files((str(packed),)) == [packed]
    with reading(tmp_path) as scratch:
        assert list(read_records(packed, scratch)) == list(read_records(plain, scratch))
        assert not list(scratch.rglob(name))


def test_compressed_files_are_named_when_they_are_broken(tmp_path: Path) -> None:
    import gzip

    broken, cut = tmp_path / "broken.jsonl.gz", tmp_path / "cut.jsonl.gz"
    broken.write_bytes(gzip.compress(b'{"text": "x"}\n{"text": \n'))
    cut.write_bytes(gzip.compress(b'{"text": "x"}\n' * 100)[:-20])
    with reading(tmp_path) as scratch:
        with pytest.raises(UserError, match=f"^{broken}, line 2 is not JSON"):
            list(read_records(broken, scratch))
        with pytest.raises(UserError, match=f"^{cut} cannot be unpacked"):
            list(read_records(cut, scratch))


def test_what_save_to_disk_leaves(tmp_path: Path) -> None:
    import datasets

    records = [{"text": f"document {number}", "n": None if number else 1} for number in range(600)]
    data = datasets.Dataset.from_list(records)
    data.save_to_disk(tmp_path / "one", num_shards=2)
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "several")
    datasets.DatasetDict({"a": data, "b": data}).save_to_disk(tmp_path / "others")
    for name in ("one", "several"):
        with reading(tmp_path) as scratch:
            files = find_files((str(tmp_path / name),))
            found = [record.values["text"] for file in files for record in read_records(file, scratch)]
        assert found == [record["text"] for record in records]
    with pytest.raises(UserError, match="holds the splits a, b: name one"):
        find_files((str(tmp_path / "others"),))
