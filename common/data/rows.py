"""Take rows out of a batch, whose values belong to rows in several ways.

Tokens, labels and masks have one row each, ``[B, ...]``. What comes with images does not: a row may have none, one or
many, each of a separate size (Qwen's ``pixel_values`` is ``[patches, ...]`` over all images of a batch). Such a value
is a list of B tensors, one for each row and None for a row without images: each is what the family's processor returns
for that row alone.
"""

from collections.abc import Mapping, Sequence

import torch
from torch.nn.functional import pad

from common.errors import UserError

BatchValue = torch.Tensor | Sequence[torch.Tensor | None]  # One row, or one list entry, per sequence


# Name of a batch's marks of padding, bool `[B, S]`: the model is not given them, and neither router losses nor the
# lengths of documents count what they mark.
PADDING = "padding"

# Values with one number for each token; all others in a batch belong to images or sound.
_OF_TOKENS = frozenset({"input_ids", "labels", "targets", "position_ids", "attention_mask", PADDING})


def holds_images(batch: Mapping[str, BatchValue | None]) -> bool:
    """Return whether a batch has values of images: those neither of tokens nor in their shape ``[B, S]``."""
    ids = batch["input_ids"]
    return any(
        not isinstance(value, torch.Tensor) or value.shape != ids.shape  # type: ignore[union-attr]
        for name, value in batch.items()
        if value is not None and name not in _OF_TOKENS
    )


def take_rows(batch: Mapping[str, BatchValue | None], start: int, stop: int) -> dict[str, torch.Tensor]:
    """Return rows ``start`` to ``stop`` of a batch, as the model takes them.

    Lists become one tensor: entries one after the other along their first dimension, and padded with zeros to the
    largest in the others, as processors do for images of several sizes. Values that no row has are left out.

    Args:
        batch: ``input_ids`` int64 ``[B, S]`` among others; 3-D ``position_ids`` are ``[axes, B, S]``.
    """
    ids = batch["input_ids"]
    assert isinstance(ids, torch.Tensor)
    rows = ids.shape[0]
    taken = {}
    for name, value in batch.items():
        if value is None:
            continue
        if isinstance(value, torch.Tensor):
            axis = 1 if name == "position_ids" and value.dim() == 3 else 0
            if value.dim() > axis and value.shape[axis] == rows:
                taken[name] = value.narrow(axis, start, min(stop, rows) - start)
            elif start == 0 and stop >= rows:
                taken[name] = value
            else:
                raise UserError(
                    f"{name} {list(value.shape)} cannot be split among {rows} sequences, of which {stop - start} are "
                    f"computed at once: give a list of {rows} tensors, one for each sequence (None for none)."
                )
        elif len(value) != rows:
            raise UserError(
                f"{name} is a list of {len(value)} for {rows} sequences: give one entry for each."
            )
        elif entries := [entry for entry in value[start:stop] if entry is not None]:
            taken[name] = _joined(entries)
    return taken


def _joined(entries: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate ``entries`` along their first dimension, padded with zeros where they differ in others."""
    sizes = [max(sizes) for sizes in zip(*(entry.shape[1:] for entry in entries), strict=True)]
    filled = []
    for entry in entries:
        missing = [
            amount for size, now in zip(sizes, entry.shape[1:], strict=True) for amount in (size - now, 0)
        ]
        filled.append(pad(entry, missing[::-1]) if any(missing) else entry)
    return torch.cat(filled)
