"""From files to batches: all tokens, right labels, any step from its number alone."""

import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

import common.data.prepare
from common.data import Batches, DataConfig, RandomBatches, open_data
from common.data.read import DataRecord
from common.data.selection import Counts
from common.errors import FinetuneError, UserError
from tests.common.data.conftest import MARKED_TEMPLATE, make_tokenizer, write_records


def documents_of(batch: dict[str, torch.Tensor]) -> list[tuple[list[int], list[int]]]:
    """ids and labels of every run of positions 0, 1, 2, ... in a batch, padding included."""
    seen: list[tuple[list[int], list[int]]] = []
    for ids, labels, positions in zip(
        *(batch[key].tolist() for key in ("input_ids", "labels", "position_ids")), strict=True
    ):
        for token, label, position in zip(ids, labels, positions, strict=True):
            if position == 0:
                seen.append(([], []))
            assert position == len(seen[-1][0])
            seen[-1][0].append(token)
            seen[-1][1].append(label)
    return seen


def epoch(batches: Batches, number: int = 0) -> list[tuple[list[int], list[int]]]:
    """The documents of one epoch, for a batch size of 1."""
    steps = range(number * batches.steps_per_epoch, (number + 1) * batches.steps_per_epoch)
    return [document for step in steps for document in documents_of(batches.batch(step))]


def pieces(ids: list[int], seq_len: int) -> list[tuple[int, ...]]:
    """How a document is cut, said once more."""
    if len(ids) <= seq_len:
        return [tuple(ids)]
    size = seq_len - 1 if len(ids) == seq_len + 1 else seq_len
    return [tuple(ids[:size]), *pieces(ids[size:], seq_len)]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(max_size=60), min_size=1, max_size=20),
    seq_len=st.integers(3, 40),
    seed=st.integers(0, 2**63),
)
def test_every_token_once_per_epoch(
    texts: list[str], seq_len: int, seed: int, tokenizer: PreTrainedTokenizerFast, tmp_path_factory: Any
) -> None:
    directory = tmp_path_factory.mktemp("epoch")
    full = [[*tokenizer(text)["input_ids"], 2] for text in texts if text.strip()]
    config = DataConfig(
        (write_records(directory / "a.jsonl", [{"text": t} for t in texts]),), seq_len, 1, seed
    )
    if not full:
        with pytest.raises(UserError, match="empty"):
            open_data(config, tokenizer, directory)
        return
    batches = open_data(config, tokenizer, directory)
    expected = Counter(piece for ids in full for piece in pieces(ids, seq_len))
    for number in (0, 1, 5):
        documents = epoch(batches, number)
        real = [(ids, labels) for ids, labels in documents if set(ids) != {0} or set(labels) != {-100}]
        assert Counter(tuple(ids) for ids, _ in real) == expected
        assert all(labels == [-100, *ids[1:]] for ids, labels in real)
        assert all(set(labels) == {-100} for ids, labels in documents if set(ids) == {0})
    assert batches.tokens == sum(map(len, full))
    assert batches.trainable_tokens == batches.tokens - expected.total()


def test_labels_reach_the_batch(jsonl: Callable[..., str], tmp_path: Path) -> None:
    tokenizer = make_tokenizer(MARKED_TEMPLATE)
    chat = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "Paris."}]
    files = (
        jsonl({"messages": chat}, name="a.jsonl"),
        jsonl({"prompt": "What is", "completion": " the fox"}, name="b.jsonl"),
        jsonl({"instruction": "Say it.", "output": "The dog"}, name="c.csv"),
        jsonl({"text": "lazy"}, name="d.parquet"),
    )
    (tmp_path / "e.txt").write_text("brown\n\nfox\n")
    batches = open_data(DataConfig((*files, str(tmp_path / "e.txt")), 200, 1), tokenizer, tmp_path / "cache")
    trained = [tokenizer.decode([label for label in labels if label >= 0]) for _, labels in epoch(batches)]
    assert sorted(filter(None, trained)) == sorted(
        ["Paris.</s>", " the fox</s>", "The dog</s>", "lazy</s>", "brown\n\nfox\n</s>"]
    )
    assert batches.description.startswith("5 documents from 5 files: ")


def test_prompt_without_completion_in_reach_is_left_out(jsonl: Callable[..., str], tmp_path: Path) -> None:
    tokenizer = make_tokenizer(bos=False)
    file = jsonl({"prompt": "dog" * 100, "completion": " fox"}, {"prompt": "a", "completion": "b"})
    batches = open_data(DataConfig((file,), 16, 1), tokenizer, tmp_path / "cache")
    for step in range(2 * batches.rows):
        assert (batches.batch(step)["labels"] >= 0).any(), "a batch whose loss would be 0/0"
    assert "left out" in batches.description


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return write_records(
        tmp_path / "a.jsonl", [{"text": f"document {i} " + "fox " * (i % 23)} for i in range(300)]
    )


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def test_batches_are_a_function_of_the_step(
    corpus: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    config = DataConfig((corpus,), 64, 4, seed=5)
    first = open_data(config, tokenizer, tmp_path / "one")
    steps = [first.batch(step) for step in range(2 * first.steps_per_epoch + 3)]
    # Resumed anywhere, in any order, from another cache.
    again = open_data(config, tokenizer, tmp_path / "two")
    for step in reversed(range(len(steps))):
        assert equal(again.batch(step), steps[step])
    for batch in steps:
        assert list(batch) == ["input_ids", "labels", "position_ids", "padding"]
        assert batch.pop("padding").dtype == torch.bool
        assert all(value.dtype == torch.int64 and value.shape == (4, 64) for value in batch.values())
    other = open_data(DataConfig((corpus,), 64, 4, seed=6), tokenizer, tmp_path / "one")
    assert not equal(other.batch(0), steps[0])


@pytest.mark.parametrize("batch_size", [1, 3, 7, 1000])
def test_epochs_follow_each_other_without_a_gap(
    corpus: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, batch_size: int
) -> None:
    """Every ``rows`` rows in a row are an epoch, also where a batch spans several."""
    batches = open_data(DataConfig((corpus,), 64, batch_size), tokenizer, tmp_path / "cache")
    rows = batches.rows
    assert batches.steps_per_epoch == -(-rows // batch_size)
    stream = torch.cat(
        [batches.batch(step)["input_ids"] for step in range(-(-3 * rows // batch_size))]
    ).tolist()
    epochs = [[tuple(row) for row in stream[number * rows : (number + 1) * rows]] for number in range(3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2]
    assert len(set(epochs[0])) == rows


def test_without_shuffling(corpus: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    batches = open_data(DataConfig((corpus,), 64, 1, shuffle=False), tokenizer, tmp_path / "cache")
    assert equal(batches.batch(0), batches.batch(batches.rows))


def test_rows_of_one_document(corpus: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """The same pieces as packed rows have, one in each row; batches are as long as their longest, up to 64 tokens."""
    packed = open_data(DataConfig((corpus,), 200, 1), tokenizer, tmp_path)
    alone = open_data(DataConfig((corpus,), 200, 4, packed=False), tokenizer, tmp_path)
    assert alone.tokens == packed.tokens and alone.trainable_tokens == packed.trainable_tokens
    assert "one document in each row" in alone.description and "one document" not in packed.description
    expected = Counter(tuple(ids) for ids, labels in epoch(packed) if any(label != -100 for label in labels))
    assert alone.rows == sum(expected.values())
    widths, seen = set(), Counter()
    for step in range(alone.steps_per_epoch):
        batch = alone.batch(step)
        assert (batch["position_ids"] == torch.arange(batch["input_ids"].shape[1])).all()
        widths.add(batch["input_ids"].shape[1])
        lengths = [int((row != -100).nonzero().max()) + 1 for row in batch["labels"]]
        assert batch["input_ids"].shape[1] == min(200, -(-max(lengths) // 64) * 64)
        rows = zip(batch["input_ids"].tolist(), lengths, strict=True)
        seen.update(tuple(ids[:length]) for ids, length in rows)
    assert not expected - seen, "every document, and at the end of the epoch a few of the next one"
    assert len(widths) > 1, "short ones come together"
    again = open_data(DataConfig((corpus,), 200, 4, packed=False), tokenizer, tmp_path / "other")
    assert all(equal(again.batch(step), alone.batch(step)) for step in (7, 2, alone.steps_per_epoch + 3))


@pytest.mark.parametrize("packed", [True, False])
def test_labels_one_position_ahead(
    packed: bool, corpus: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """What the next position's label would be, and nothing of another document."""
    shifting, ahead = (
        open_data(DataConfig((corpus,), 64, 3, packed=packed, labels_ahead=labels_ahead), tokenizer, tmp_path)
        for labels_ahead in (False, True)
    )
    assert ahead.labels_ahead and not shifting.labels_ahead
    for step in range(3):
        plain, moved = shifting.batch(step), ahead.batch(step)
        assert torch.equal(moved["input_ids"], plain["input_ids"])
        assert (
            torch.equal(moved["labels"][:, :-1], plain["labels"][:, 1:])
            and (moved["labels"][:, -1] == -100).all()
        )
        ends = plain["position_ids"][:, 1:] == 0
        assert (moved["labels"][:, :-1][ends] == -100).all()
    random = RandomBatches(97, 8, 2, labels_ahead=True).batch(0)
    assert torch.equal(random["labels"][:, :-1], random["input_ids"][:, 1:])


def test_cache_is_used_again_and_noticed_when_stale(
    corpus: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    config = DataConfig((corpus,), 64, 2)

    def token_files() -> dict[str, int]:
        return {path.name: path.stat().st_ino for path in cache.iterdir()}

    batches = open_data(config, tokenizer, cache)
    before, first = batches.batch(3), batches.digest
    [name] = token_files()
    prepared = token_files()
    assert equal(open_data(DataConfig((corpus,), 64, 2), make_tokenizer(), cache).batch(3), before)
    # Leaves its mark in the tokenizer
    tokenizer(["padded", "and cut"], padding=True, truncation=True, max_length=4)
    open_data(DataConfig((corpus,), 64, 5, seed=9), tokenizer, cache)
    assert token_files() == prepared, "made once more"

    (cache / name).write_bytes((cache / name).read_bytes()[:-4])  # damaged
    assert equal(open_data(config, tokenizer, cache).batch(3), before)
    (cache / name).write_bytes(b"")
    assert equal(open_data(config, tokenizer, cache).batch(3), before)
    flip(cache / name, 13)  # in the header
    assert equal(open_data(config, tokenizer, cache).batch(3), before)

    open_data(DataConfig((corpus,), 65, 2), tokenizer, cache)
    open_data(config, make_tokenizer(bos=False), cache)
    open_data(config, make_tokenizer(MARKED_TEMPLATE), cache)
    os.utime(corpus, (0, 0))
    again = open_data(config, tokenizer, cache)
    assert len(token_files()) == 5
    assert again.digest == first and open_data(config, make_tokenizer(bos=False), cache).digest != first


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)


def test_a_flipped_bit_is_never_trained_on(
    corpus: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    config = DataConfig((corpus,), 64, 1, shuffle=False)
    batches = open_data(config, tokenizer, tmp_path)
    (file,) = tmp_path.glob("*.tokens")
    second = (1 << 16) + 64 * 4 + 8
    for at in (second, second + 17, second + 64 * 4 + 7):  # a row is followed by its label and checksum
        flip(file, at)
        assert batches.batch(0) and batches.batch(2)
        with pytest.raises(
            FinetuneError, match=rf"damaged: bytes {second:,} to 66,063 of {re.escape(str(file))} are not"
        ):
            batches.batch(1)
        flip(file, at)
    assert batches.batch(1)


def test_what_a_killed_process_left_is_removed_and_two_take_turns(
    corpus: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "data-0123456789abcdef.tokens.tmp").touch()
    built: list[Path] = []
    real = common.data.prepare.write_token_file

    def write(path: Path, header: Counts) -> AbstractContextManager[Callable[..., None]]:
        built.append(path)
        time.sleep(0.3)  # the other one looks for the file meanwhile
        return real(path, header)

    monkeypatch.setattr("common.data.prepare.write_token_file", write)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(
            lambda _: open_data(DataConfig((corpus,), 64, 1), tokenizer, cache), range(2)
        )
    assert equal(first.batch(1), second.batch(1)) and built == list(cache.iterdir())


def test_nothing_is_left_of_a_file_that_could_not_be_finished(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a fox"}\n' * 20_000 + '{"text": \n')
    with pytest.raises(UserError, match="line 20001"):
        open_data(DataConfig((str(file),), 512, 1), tokenizer, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("change", ["append", "rewrite", "replace", "remove"])
def test_a_file_that_changes_while_it_is_read_is_named(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    file, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for path in (file, other):
        path.write_text('{"text": "a fox"}\n' * 20)
    before, real = file.stat(), common.data.prepare.write_token_file

    def write(path: Path, header: Counts) -> AbstractContextManager[Callable[..., None]]:
        if change == "append":
            file.write_text('{"text": "a fox"}\n' * 21)
            os.utime(file, ns=(0, before.st_mtime_ns))
        elif change in ("rewrite", "keep the time"):
            file.write_text('{"text": "a dog"}\n' * 20)
            if change == "keep the time":
                os.utime(file, ns=(0, before.st_mtime_ns))
        elif change == "replace":
            other.rename(file)
            os.utime(file, ns=(0, before.st_mtime_ns))
        else:
            file.unlink()
        return real(path, header)

    def read_at_once(*_: object) -> Iterator[DataRecord]:
        yield DataRecord({"text": "a fox"}, file, "line 1")

    monkeypatch.setattr("common.data.prepare.write_token_file", write)
    monkeypatch.setattr("common.data.selection.RecordSelection.read", read_at_once)
    with pytest.raises(UserError, match=r"a\.jsonl has changed while it was read"):
        open_data(DataConfig((str(file),), 64, 1), tokenizer, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(("content", "told"), [
    ("", ["empty", "a.jsonl"]),
    ('{"text": ""}\n{"text": null}\n', ["empty", "a.jsonl"]),
    ('{"messages": [{"role": "user", "content": "x"}]}\n', ["no token to train on", "assistant"]),
    ('{"words": "x", "id": 1}\n', ["words, id", "messages"]),
])  # fmt: skip
def test_nothing_to_train_on(tmp_path: Path, content: str, told: list[str]) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(UserError) as error:
        open_data(DataConfig((str(tmp_path),), 64, 1), make_tokenizer(MARKED_TEMPLATE), tmp_path / "cache")
    assert all(word in str(error.value) for word in told), error.value


@pytest.mark.slow
def test_memory_does_not_grow_with_the_data(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Building and reading a file of many MiB: what the process has mapped or allocated hardly changes."""

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    if not Path("/proc/self/statm").exists():
        pytest.skip("resident memory is read from /proc")
    line = json.dumps({"text": "The quick brown fox jumps over the lazy dog. " * 20}) + "\n"
    small, large = tmp_path / "small.jsonl", tmp_path / "large.jsonl"
    small.write_text(line * 1000)
    large.write_text(line * 16_000)  # 15 MB
    open_data(DataConfig((str(small),), 512, 2), tokenizer, tmp_path / "cache")
    before = resident_bytes()
    batches = open_data(DataConfig((str(large),), 512, 2), tokenizer, tmp_path / "cache")
    for step in range(0, batches.steps_per_epoch, 7):
        batches.batch(step)
    token_bytes = sum(path.stat().st_size for path in (tmp_path / "cache").iterdir())
    assert token_bytes > 8 << 20
    assert resident_bytes() - before < 50 << 20


def test_random_batches() -> None:
    batches = RandomBatches(100, 32, 4, seed=1)
    assert isinstance(batches, Batches)
    batch = batches.batch(7)
    assert equal(batch, RandomBatches(100, 32, 4, seed=1).batch(7))
    assert not equal(batch, batches.batch(8))
    assert {tuple(value.shape) for value in batch.values()} == {(4, 32)}
    assert int(batch["input_ids"].max()) < 100
    assert torch.equal(batch["labels"][:, 1:], batch["input_ids"][:, 1:])
    assert (batch["labels"][:, 0] == -100).all()
    assert batch["position_ids"].tolist() == [list(range(32))] * 4
    assert (batches.tokens, batches.trainable_tokens, batches.rows, batches.steps_per_epoch) == (
        128,
        124,
        4,
        1,
    )
    assert np.unique(batch["input_ids"].numpy()).size > 50
