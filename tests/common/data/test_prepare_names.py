"""A prepared file is used for the data that it was made of, wherever it lies."""

import os
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from common.data import DataConfig, open_data
from tests.common.data.conftest import write_records


def test_files_that_were_exchanged_are_made_again(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    files, cache = [], tmp_path / "cache"
    for word in ("Paris", "lazy dog"):
        data = write_records(tmp_path / f"{word}.jsonl", [{"text": f"The {word} jumps."}] * 3)
        before = set(cache.glob("*.tokens"))
        expected = open_data(DataConfig((data,), 16, 1), tokenizer, cache)
        [file] = set(cache.glob("*.tokens")) - before
        files.append((data, file, expected.batch(0)["input_ids"].clone()))
        expected.close()
    (_, first, _), (_, second, _) = files
    first.rename(tmp_path / "kept")
    second.rename(first)
    (tmp_path / "kept").rename(second)
    for data, _, ids in files:
        batches = open_data(DataConfig((data,), 16, 1), tokenizer, cache)
        assert batches.batch(0)["input_ids"].equal(ids)
        batches.close()


def test_a_pipe_with_the_name_of_a_prepared_file_is_replaced(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    data = write_records(tmp_path / "a.jsonl", [{"text": "The fox jumps."}] * 3)
    open_data(DataConfig((data,), 16, 1), tokenizer, tmp_path / "cache").close()
    [file] = (tmp_path / "cache").glob("*.tokens")
    file.unlink()
    os.mkfifo(file)
    open_data(DataConfig((data,), 16, 1), tokenizer, tmp_path / "cache").close()
    assert file.is_file()


def test_a_changed_file_of_the_same_size_and_time_is_read_again(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """As a copy that keeps the time leaves it."""
    file, ids = tmp_path / "a.jsonl", []
    for word in ("fox", "dog"):
        times = (file.stat().st_atime_ns, file.stat().st_mtime_ns) if ids else None
        data = write_records(file, [{"text": f"The {word} jumps."}] * 3)
        if times is not None:
            os.utime(file, ns=times)
        batches = open_data(DataConfig((data,), 16, 1), tokenizer, tmp_path / "cache")
        ids.append(batches.batch(0)["input_ids"].clone())
        batches.close()
    assert not ids[0].equal(ids[1])
