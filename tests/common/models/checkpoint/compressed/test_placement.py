"""Where tensors of a checkpoint go in a parameter: as transformers' own operations put them, or not said at all."""

import pytest
import torch
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, Transpose, WeightConverter

from common.models.checkpoint.compressed import Placements
from common.models.checkpoint.shards import Conversion
from common.models.meta_model import build_meta_model
from tests.helpers.models.families import family_config

EXPERTS = 3


class Interleave(ConversionOps):
    """Rows of two tensors in turn: a tensor is in several pieces."""

    def convert(self, input_dict, **_):
        first, second = (value[0] for value in input_dict.values())
        return {"w": torch.stack((first, second), 1).flatten(0, 1)}


class Twice(ConversionOps):
    """Leaves something out and has something twice."""

    def convert(self, input_dict, **_):
        first, _ = (value[0] for value in input_dict.values())
        return {"w": torch.cat((first, first))}


@pytest.fixture(scope="module")
def placements() -> Placements:
    return Placements(build_meta_model(family_config("llama")))


def conversion(patterns: list[str], operations: list[ConversionOps], each: int) -> Conversion:
    rule = WeightConverter(source_patterns=patterns, target_patterns="w", operations=operations)
    return Conversion("w", rule, [(pattern, f"{pattern}.{index}") for pattern in patterns for index in range(each)])


@pytest.mark.parametrize(("patterns", "operations"), [
    (["up"], [MergeModulelist(dim=0)]),
    (["gate", "up"], [MergeModulelist(dim=0), Concatenate(dim=1)]),
    (["gate", "up"], [MergeModulelist(dim=0), Concatenate(dim=2)]),
    (["gate", "up"], [MergeModulelist(dim=0), Concatenate(dim=1), Transpose(1, 2)]),
])  # fmt: skip
def test_as_transformers_puts_them(patterns, operations, placements: Placements) -> None:
    asked = conversion(patterns, operations, EXPERTS)
    parts = {name: torch.randn(6, 10) for _, name in asked.parts}
    (made,) = asked.convert(placements._model, parts.__getitem__).values()
    found = placements.place(asked, (6, 10), made.shape)
    assert found is not None
    strides, offsets = found
    flat = torch.full((made.numel(),), torch.nan)
    for offset, (_, name) in zip(offsets, asked.parts, strict=True):
        flat.as_strided((6, 10), strides, offset).copy_(parts[name])
    assert torch.equal(flat.view(made.shape), made)


@pytest.mark.parametrize("operations", [[Interleave()], [Twice()]])
def test_not_side_by_side(operations, placements: Placements) -> None:
    assert placements.place(conversion(["gate", "up"], operations, 1), (6, 10), (12, 10)) is None


def test_parts_that_are_too_few(placements: Placements) -> None:
    assert placements.place(conversion(["up"], [MergeModulelist(dim=0)], 2), (6, 10), (3, 6, 10)) is None
