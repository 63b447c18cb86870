"""Finding: files, directories, their splits, and what is no data."""

import json
import shutil
from pathlib import Path

import datasets
import pytest

from common.data.files import find_files
from common.data.read import read_records
from common.errors import UserError


def touch(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text("x")


def found_in(directory: Path, split: str = "") -> list[str]:
    return [str(path.relative_to(directory)) for path in find_files((f"{directory}{split}",))]


def test_directories(tmp_path: Path) -> None:
    touch(
        tmp_path,
        "b.jsonl",
        "a.TXT",
        "sub/c.csv",
        "README.md",
        ".hidden/x.jsonl",
        ".x.jsonl",
        "sub/deep/a.parquet",
    )
    assert found_in(tmp_path) == ["a.TXT", "b.jsonl", "sub/c.csv", "sub/deep/a.parquet"]
    assert find_files((str(tmp_path / "b.jsonl"),)) == [tmp_path / "b.jsonl"]


def test_names_that_are_no_data(tmp_path: Path) -> None:
    touch(tmp_path, "chats.jsonl", "notes.docx")
    (tmp_path / "empty").mkdir()
    for name, words in [
        ("chat.jsonl", ["chat.jsonl", "Did you mean 'chats.jsonl'?"]),
        ("nowhere/chat.jsonl", ["nowhere/chat.jsonl"]),
        ("notes.docx", ["notes.docx", ".jsonl, .json, .csv, .tsv, .parquet, .txt"]),
        ("empty", ["empty", "nothing", ".jsonl"]),
    ]:
        with pytest.raises(UserError) as error:
            find_files((str(tmp_path / name),))
        assert all(word in str(error.value) for word in words), error.value
    touch(tmp_path, "empty/weights.bin")
    with pytest.raises(UserError, match=r"\.bin"):
        find_files((str(tmp_path / "empty"),))


@pytest.mark.parametrize("names", [
    ("data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet", "dataset_infos.json"),
    ("train.jsonl", "test.jsonl", "README.md"),
    ("train/a.jsonl", "validation/a.jsonl"),
    ("math_train.csv", "math_dev.csv"),
])  # fmt: skip
def test_a_directory_of_several_splits_is_read_by_split(tmp_path: Path, names: tuple[str, ...]) -> None:
    touch(tmp_path, *names)
    other = "test" if "test" in names[1] else "validation"
    assert (found_in(tmp_path), found_in(tmp_path, f":{other}")) == ([names[0]], [names[1]])
    with pytest.raises(UserError, match=rf"holds the splits .*: name one, as in {tmp_path}:"):
        found_in(tmp_path, ":other")
    (tmp_path / names[0]).rename(tmp_path / f"more{Path(names[0]).suffix}")
    with pytest.raises(UserError, match=rf"the splits {other}, and files of no split, such as .*more"):
        found_in(tmp_path)


def test_a_directory_of_one_split_is_read_whole(tmp_path: Path) -> None:
    touch(tmp_path, "test-1.jsonl", "test-2.jsonl", "latest.bin")
    assert found_in(tmp_path) == ["test-1.jsonl", "test-2.jsonl"]


def test_splits_as_a_repository_configures_them(tmp_path: Path) -> None:
    for name in ("one.jsonl", "two.jsonl", "three.jsonl"):
        (tmp_path / name).write_text('{"text": "x"}\n')
    (tmp_path / "README.md").write_text(
        "---\nlicense: mit\nconfigs:\n- config_name: default\n  data_files:\n"
        "  - {split: train, path: one.jsonl}\n  - {split: held, path: two.jsonl}\n---\n# Data\n"
    )
    assert (found_in(tmp_path), found_in(tmp_path, ":held")) == (["one.jsonl"], ["two.jsonl"])
    with pytest.raises(UserError, match="has no split 'test', but train, held"):
        found_in(tmp_path, ":test")


def test_what_save_to_disk_leaves(tmp_path: Path) -> None:
    records = [{"text": f"document {number}", "n": None if number else 1} for number in range(600)]
    data = datasets.Dataset.from_list(records)
    data.save_to_disk(tmp_path / "one", num_shards=2)
    # As map leaves
    shutil.copy(tmp_path / "one" / "data-00000-of-00002.arrow", tmp_path / "one" / "cache-abc.arrow")
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "several")
    datasets.DatasetDict({"a": data, "b": data}).save_to_disk(tmp_path / "others")
    data.save_to_disk(tmp_path / "sets" / "x")
    data.save_to_disk(tmp_path / "sets" / "y")
    for name, count in (("one", 1), ("several", 1), ("several:test", 1), ("others:b", 1), ("sets", 2)):
        files = find_files((str(tmp_path / name),))
        texts = [record.values["text"] for file in files for record in read_records(file)]
        assert texts == [record["text"] for record in records] * count, name
    with pytest.raises(UserError, match=r"holds the splits a, b: name one, as in .*others:a"):
        find_files((str(tmp_path / "others"),))


def test_a_missing_file_of_what_save_to_disk_left_is_named(tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"text": str(number)} for number in range(9)]).save_to_disk(
        tmp_path, num_shards=3
    )
    (tmp_path / "data-00001-of-00003.arrow").unlink()
    with pytest.raises(UserError, match=r"data-00001-of-00003\.arrow is missing, which state\.json lists"):
        find_files((str(tmp_path),))


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    "header", ["", "---\nconfigs:\n- {config_name: default, data_files: '*.csv'}\n---\n"]
)
def test_a_missing_file_of_those_that_count_themselves_is_named(
    tmp_path: Path, first: int, header: str
) -> None:
    names = [f"train-{number:05}-of-00003.csv" for number in range(first, first + 3)]
    touch(tmp_path, *names, "train-00000-of-00001.csv", "train-1-of-9.csv")
    (tmp_path / "README.md").write_text(header)
    assert set(names) < set(found_in(tmp_path))
    (tmp_path / names[1]).rename(tmp_path / f"{names[1]}.part")
    with pytest.raises(
        UserError, match=rf"train-0000{first + 1}-of-00003 is missing, 1 file of 3 in all: fetch it"
    ):
        find_files((str(tmp_path),))
    assert len(find_files((str(tmp_path / names[0]), str(tmp_path / names[2])))) == 2


def test_a_link_to_nothing_and_an_empty_file_among_others_are_named(tmp_path: Path) -> None:
    touch(tmp_path, "a.jsonl")
    (tmp_path / "b.jsonl.gz").symlink_to("/nowhere/b")
    with pytest.raises(UserError, match=r"b\.jsonl\.gz is a link to /nowhere/b, which does not exist"):
        find_files((str(tmp_path),))
    (tmp_path / "b.jsonl.gz").unlink()
    (tmp_path / "b.jsonl.gz").touch()
    for names in ([tmp_path], [tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"]):
        with pytest.raises(UserError, match=r"b\.jsonl\.gz has 0 bytes"):
            find_files(tuple(map(str, names)))


def test_a_file_of_a_name_that_datasets_uses_is_data_where_it_stands_alone(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps([{"text": "x"}]))
    assert found_in(tmp_path) == ["state.json"]


def test_what_datasets_has_made_of_files_is_not_read_with_them(tmp_path: Path) -> None:
    """``map`` keeps its result in the directory of a data set that was loaded from disk."""
    names = [
        "data-00000-of-00001.arrow",
        "cache-2b45ddac336e0d7a.arrow",
        "cache-2b45ddac336e0d7a_00001_of_00002.arrow",
    ]
    data, *made = (tmp_path / name for name in names)
    for file in (data, *made):
        file.write_text("x")
        assert find_files((str(file),)) == [file]
    assert find_files(tuple(map(str, made))) == made
    for file in made:
        with pytest.raises(UserError, match=f"{file} is what datasets has made of the files next to it"):
            find_files((str(data), str(file)))
