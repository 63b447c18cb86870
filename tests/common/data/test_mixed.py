"""Data sets with weights: parts that are exact, orders that are pure functions of the step."""

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from common.data import DataConfig, PackedBatches, open_data
from common.data.batches import BLOCK, MixedBatches, counts_of
from common.data.demo_text import train_demo_tokenizer
from common.errors import UserError


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[PackedBatches]:
    folder = tmp_path_factory.mktemp("mixed")
    train_demo_tokenizer(300, folder / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    opened = []
    for name, documents in (("a", 7), ("b", 40), ("c", 3)):
        file = folder / f"{name}.jsonl"
        file.write_text(
            "".join(f'{{"text": "{" ".join([name, str(number)] * 8)}"}}\n' for number in range(documents))
        )
        opened.append(open_data(DataConfig((str(file),), 16, 4, seed=3), tokenizer, folder / "cache"))
    return opened


@pytest.mark.parametrize(
    ("weights", "counts"),
    [((0.7, 0.3), [700, 300]), ((1, 1, 1), [334, 333, 333]), ((7, 0.007), [999, 1]), ((5,), [1000])],
)
def test_weights_in_any_unit(weights: tuple[float, ...], counts: list[int]) -> None:
    assert counts_of(weights).tolist() == counts


@pytest.mark.parametrize("weights", [(1, 0), (1, -1), (1, 1e-5)])
def test_weights_that_are_none(weights: tuple[float, ...]) -> None:
    with pytest.raises(UserError, match=r"more than 0|the least is a thousandth"):
        counts_of(weights)


@pytest.mark.parametrize("batch_size", [pytest.param(7, marks=pytest.mark.slow), 40])
def test_rows_come_by_weight_and_each_data_set_goes_through_its_epochs(
    parts: list[PackedBatches], batch_size: int
) -> None:
    weights = (0.5, 0.3, 0.2)
    mixed = MixedBatches(parts, weights, batch_size, seed=3)
    steps = -(-2 * BLOCK // batch_size)
    rows = torch.cat([mixed.batch(step)["input_ids"] for step in range(steps)])[: 2 * BLOCK]
    seen = {tuple(row) for row in rows.tolist()}
    at = np.zeros(len(parts), dtype=int)
    rows_of_parts = [
        torch.cat([part.batch(step)["input_ids"] for step in range(2 * BLOCK // 4)]).tolist()
        for part in parts
    ]  # the data sets alone, as far as they are drawn
    for row in rows.tolist():  # each row is the next one of some data set
        source = next(n for n, rows_of in enumerate(rows_of_parts) if rows_of[at[n]] == row)
        at[source] += 1
    assert at.tolist() == [1000, 600, 400]
    assert len(seen) > 50  # some pieces of some documents are alike
    assert mixed.batch(5)["labels"].equal(MixedBatches(parts, weights, batch_size, seed=3).batch(5)["labels"])


def test_another_seed_or_weight_is_another_order(parts: list[PackedBatches]) -> None:
    first, other = (MixedBatches(parts, (1, 1, 1), 8, seed) for seed in (0, 1))
    assert not all(first.batch(step)["input_ids"].equal(other.batch(step)["input_ids"]) for step in range(4))
    assert first.digest != MixedBatches(parts, (1, 1, 2), 8, 0).digest
    assert "0.334 of all rows: 7 documents" in first.description
