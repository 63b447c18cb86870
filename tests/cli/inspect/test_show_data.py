"""Rows as ``--show-data`` prints them: what is read or trained on stands between marks, and there is no padding."""

from typing import Any

import pytest
import torch

from cli.inspect.show_data import _rows
from common.data import Batches
from common.data.rows import PADDING

IDS = torch.tensor([[5, 6, 7, 0, 0], [8, 9, 0, 0, 0]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]])
READ = (IDS != 0).long()
ALL, PARTS = (
    [[(5, True), (6, True), (7, True)], [(8, True), (9, True)]],
    [[(5, False), (6, True), (7, True)], [(8, False), (9, True)]],
)
ANSWERS = IDS.masked_fill((IDS == 0) | (torch.arange(5) == 0), -100)


class OneBatch(Batches):
    """A single batch."""

    def __init__(self, values: dict[str, Any], labels_ahead: bool) -> None:
        self.values, self.labels_ahead = values, labels_ahead

    def batch(self, step: int) -> dict[str, Any]:
        return dict(self.values)


@pytest.mark.parametrize(("values", "labels_ahead", "shown"), [
    ({"attention_mask": READ}, False, ALL),  # of rewards
    ({"attention_mask": READ}, True, ALL),
    ({"attention_mask": READ, "labels": torch.tensor([1, 0])}, True, ALL),  # of classes
    ({"attention_mask": READ, "labels": ANSWERS}, False, PARTS),  # with images
    ({"labels": ANSWERS, "position_ids": POSITIONS, PADDING: READ == 0}, False, PARTS),
])  # fmt: skip
def test_rows_without_padding_and_what_of_them_is_trained(
    values: dict[str, Any], labels_ahead: bool, shown: Any
) -> None:
    rows = list(_rows(OneBatch({"input_ids": IDS, **values}, labels_ahead), 2))
    assert rows == [[document] for document in shown]
