"""Rows of parameters that a source reads alone, against those of whole parameters."""

import torch

from common.models.checkpoint.sources import WeightSource


def rows_are_alike(source: WeightSource, name: str, whole: torch.Tensor) -> bool:
    """Return whether rows of a parameter can be read, after asserting that they are the whole one's, in any order."""
    if not source.reads_rows(name):
        return False
    rows = whole.shape[0]
    for first, stop in ((rows // 3, rows), (0, rows // 3), (rows // 2, rows // 2 + 1)):
        if first < stop:
            part = source.read_rows(name, first, stop)
            assert part.dtype == whole.dtype and torch.equal(part, whole[first:stop]), (name, first, stop)
    return True
