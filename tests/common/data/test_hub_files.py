"""Data sets by a hub's name, from caches that are made here: nothing is fetched."""

import json
from pathlib import Path

import datasets
import huggingface_hub
import pytest

from common.data.files import find_files
from common.errors import UserError

CONFIGURED = (
    "---\nconfigs:\n- config_name: a\n  data_files: train.jsonl\n"
    "- config_name: b\n  data_files: test.jsonl\n---\n"
)


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What ``hf download --repo-type dataset me/facts`` leaves."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    root = tmp_path / "hub" / "datasets--me--facts"
    folder = root / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("abc")
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(json.dumps({"text": split}) + "\n")
    return folder


def test_files_of_a_split(snapshot: Path) -> None:
    assert find_files(("me/facts",)) == [snapshot / "train.jsonl"]
    assert find_files(("me/facts:test",)) == [snapshot / "test.jsonl"]
    with pytest.raises(UserError, match=r"has no split 'tset', but train, test: .*Did you mean 'test'"):
        find_files(("me/facts:tset",))
    (snapshot / "README.md").write_text(CONFIGURED)
    with pytest.raises(UserError, match=r"pick one among the available configs: \['a', 'b'\]"):
        find_files(("me/facts",))
    assert find_files(("me/facts:b:train",)) == [snapshot / "test.jsonl"]


def test_a_file_of_that_name_comes_first_and_what_is_nowhere_is_rejected(
    snapshot: Path, tmp_path: Path
) -> None:
    (tmp_path / "me").mkdir()
    (tmp_path / "me" / "facts").mkdir()
    (tmp_path / "me" / "facts" / "own.txt").write_text("mine")
    assert find_files(("me/facts",)) == [tmp_path / "me" / "facts" / "own.txt"]
    with pytest.raises(UserError, match=r"`hf download --repo-type dataset you/fiction`, or add download"):
        find_files(("you/fiction",))


def test_what_datasets_has_prepared(snapshot: Path, tmp_path: Path) -> None:
    """As its cache has it after ``load_dataset("me/other")``."""
    loaded = datasets.load_dataset(
        "json", data_files={"train": str(snapshot / "train.jsonl")}, cache_dir=tmp_path / "made"
    )
    (file,) = (Path(cached["filename"]) for cached in loaded["train"].cache_files)
    folder = tmp_path / "datasets" / "me___other" / "default" / "0.0.0"
    folder.mkdir(parents=True)
    file.parent.rename(folder / "abc")
    (folder / "abc" / file.name).rename(folder / "abc" / "other-train.arrow")
    assert find_files(("me/other",)) == [folder / "abc" / "other-train.arrow"]
