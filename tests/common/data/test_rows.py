"""What of a batch belongs to which rows."""

import pytest
import torch

from common.data.rows import holds_images, take_rows
from common.errors import UserError


def test_lists_have_one_entry_for_each_row() -> None:
    batch = {
        "input_ids": torch.arange(12).view(3, 4),
        "position_ids": torch.arange(36).view(3, 3, 4),  # three axes
        "pixel_values": [torch.ones(2, 5), None, torch.full((3, 5), 2.0)],
        "nothing": None,
    }
    first, last = take_rows(batch, 0, 2), take_rows(batch, 2, 4)
    assert first["input_ids"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert torch.equal(first["position_ids"], batch["position_ids"][:, :2])
    assert torch.equal(first["pixel_values"], torch.ones(2, 5))
    assert torch.equal(last["pixel_values"], torch.full((3, 5), 2.0))
    assert last["input_ids"].tolist() == [[8, 9, 10, 11]]
    assert "pixel_values" not in take_rows(batch, 1, 2)
    assert "nothing" not in first


def test_images_of_several_sizes_are_filled_up_with_zeros_at_the_end() -> None:
    batch = {"input_ids": torch.zeros(2, 3), "pixel_values": [torch.ones(1, 3, 2, 5), torch.ones(2, 3, 4, 1)]}
    joined = take_rows(batch, 0, 2)["pixel_values"]
    assert joined.shape == (3, 3, 4, 5)
    assert torch.equal(joined[0, :, :2], torch.ones(3, 2, 5)) and not joined[0, :, 2:].any()
    assert torch.equal(joined[1:, :, :, :1], torch.ones(2, 3, 4, 1)) and not joined[1:, :, :, 1:].any()


def test_what_cannot_be_split_is_rejected() -> None:
    batch = {"input_ids": torch.zeros(3, 4), "pixel_values": torch.zeros(7, 5)}
    assert take_rows(batch, 0, 3)["pixel_values"].shape == (7, 5)  # all rows at once: nothing to split
    with pytest.raises(
        UserError, match=r"pixel_values \[7, 5\] cannot be split among 3 sequences, of which 2"
    ):
        take_rows(batch, 0, 2)
    with pytest.raises(UserError, match="a list of 2 for 3 sequences"):
        take_rows({"input_ids": torch.zeros(3, 4), "pixel_values": [None, None]}, 0, 1)


def test_which_batches_hold_images() -> None:
    ids = torch.zeros(2, 4)
    text = {"input_ids": ids, "labels": ids, "position_ids": torch.zeros(3, 2, 4), "token_type_ids": ids}
    assert not holds_images({**text, "attention_mask": torch.zeros(2, 1, 4, 4), "pixel_values": None})
    assert holds_images({**text, "pixel_values": [None, torch.zeros(3)]})
    assert holds_images({**text, "image_sizes": torch.zeros(2, 2)})
