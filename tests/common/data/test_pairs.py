"""Pairs of answers: the shapes that records have, and the rows that they become."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from common.data import DataConfig, open_data
from common.data.demo_text import train_demo_tokenizer
from common.data.examples import PlainText, pair_kind, pairs_of_records
from common.data.read import DataRecord
from common.errors import UserError
from common.units import counted


def pairs_of(*records: dict[str, Any]) -> list[tuple[Any, Any]]:
    made = pairs_of_records(
        DataRecord(one, Path("a.jsonl"), f"line {i + 1}") for i, one in enumerate(records)
    )
    return [item.examples for item in made]


@pytest.mark.parametrize(("record", "prompt", "answers"), [
    ({"prompt": "2+2 ", "chosen": "4", "rejected": "5"}, "2+2 ", ("4", "5")),
    ({"chosen": "Say it: two words", "rejected": "Say it: two wombats"}, "Say it: two ", ("words", "wombats")),
    ({"chosen": "yes", "rejected": "yesterday"}, "", ("yes", "yesterday")),
])  # fmt: skip
def test_texts(record: dict[str, Any], prompt: str, answers: tuple[str, str]) -> None:
    expected = tuple(PlainText(prompt, answer, where="a.jsonl, line 1") for answer in answers)
    assert pairs_of(record) == [expected]


def test_not_a_pair_is_rejected() -> None:
    with pytest.raises(UserError, match=r"line 1 has the columns text; a pair has chosen and rejected"):
        pairs_of({"text": "hello"})
    with pytest.raises(UserError, match="must both be texts, or both be lists"):
        pairs_of({"chosen": "a", "rejected": [{"role": "user", "content": "a"}]})
    for record in ({"chosen": "", "rejected": "b"}, {"chosen": "b", "rejected": None}):  # nothing to prefer
        assert pairs_of({"prompt": "a", **record}) == [()]
    empty = pairs_of({"prompt": "a", "chosen": "b", "rejected": ""})  # to end at once is worse
    assert [answer.completion for answer in empty[0]] == ["b", ""]


def test_rows_are_pairs_in_every_epoch(tmp_path: Path) -> None:
    train_demo_tokenizer(384, tmp_path / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    records = [{"prompt": f"{i} is ", "chosen": "odd " * (i + 1), "rejected": "even"} for i in range(5)]
    records.append({"prompt": "x" * 400, "chosen": "a", "rejected": "b"})  # no room for an answer
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    config = DataConfig((str(tmp_path / "pairs.jsonl"),), 32, 2, seed=3, kind=pair_kind())
    batches = open_data(config, tokenizer, tmp_path / "cache")
    assert (batches.rows, batches.steps_per_epoch, batches.rows_per_item) == (5, 3, 2)
    assert "5 pairs from 1 file" in batches.description and "left out: 1 record, " in batches.description
    seen = []
    for step in range(5):  # two epochs
        batch = batches.batch(step)
        assert batch["input_ids"].shape[0] == 4
        for chosen, rejected in zip(batch["input_ids"][::2], batch["input_ids"][1::2], strict=True):
            texts = [tokenizer.decode(row, skip_special_tokens=True).strip() for row in (chosen, rejected)]
            number = int(texts[0].split()[0])
            assert texts[0].split()[2:] == ["odd"] * (number + 1) and texts[1].startswith(f"{number} is even")
            seen.append(number)
        untrained = (batch["labels"] == -100) | (batch["labels"] == batch["input_ids"])
        assert untrained.all() and (batch["position_ids"] == torch.arange(batch["input_ids"].shape[1])).all()
    assert sorted(seen) == sorted([*range(5)] * 2) and seen[:5] != list(range(5))
    again = open_data(config, tokenizer, tmp_path / "cache")
    assert again.digest == batches.digest
    again.close()
    batches.close()


@pytest.mark.parametrize("classifies", [False, True])
def test_pairs_that_are_alike_in_their_rows_are_left_out(classifies: bool, tmp_path: Path) -> None:
    """Answers that differ behind the end of the row, or nowhere, have gradients that cancel."""
    train_demo_tokenizer(384, tmp_path / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    file = tmp_path / "pairs.jsonl"
    shared = [0, 3, 40, 5, 60]
    answers = [("odd " * times + "yes", "odd " * times + "no") for times in shared]
    records = [
        {"prompt": "Is it? ", "chosen": better, "rejected": worse}
        for better, worse in [*answers, ("so", "so")]
    ]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    for seq_len, count in ((32, 3), (512, 5)):
        config = DataConfig((str(file),), seq_len, 1, kind=pair_kind(classifies))
        batches = open_data(config, tokenizer, tmp_path / "cache")
        assert batches.rows == count
        first = 3 if seq_len == 32 else 6
        assert (
            f"left out: {counted(6 - count, 'record')}; first {file}, line {first}; chosen and rejected are the same, "
            f"within rows of {seq_len} tokens" in batches.description
        )
        for step in range(count):
            ids = batches.batch(step)["input_ids"]
            assert not torch.equal(ids[0], ids[1])
        batches.close()
    file.write_text(json.dumps(records[-1]))
    with pytest.raises(UserError, match=r"no token to train on .* chosen and rejected are the same"):
        open_data(DataConfig((str(file),), 32, 1, kind=pair_kind(classifies)), tokenizer, tmp_path / "cache")
