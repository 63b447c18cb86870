"""HO-Ring and quantised collectives, against plain twins, in awkward sizes; and FSDP2 training with them."""

from functools import partial
from typing import Any

import pytest
import torch

from tests.fcdp.cases import Case, train
from tests.fcdp.collectives import cases
from tests.fcdp.pool import Pool

LAYOUTS = [(2, 2), (4, 1), (1, 4), (3, 1)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_collective_on_every_layout(pool: Pool, layout: tuple[int, int]) -> None:
    for ring in ("hierarchical", "ho"):
        for precision, dtype in (
            ("bf16", torch.bfloat16),
            ("int8", torch.bfloat16),
            ("int4", torch.float32),
            ("int8", torch.uint8),
        ):
            pool.run(layout, cases.gather, ring, precision, dtype)
    for average in (True, False):
        pool.run(layout, cases.reduce, average)
    for bits in (8, 4):
        pool.run(layout, cases.reduce_quantised, bits)
    pool.run(layout, cases.ring_alone)


@pytest.mark.parametrize("ring", ["hierarchical", "ho"])
def test_fsdp2_trains_bit_equal_with_shaped_collectives(pool: Pool, ring: str) -> None:
    case = Case(bf16=True, checkpointing=True, steps=3)
    shaping = partial(cases.shape, ring=ring, gather="bf16", reduce="bf16")
    shaped = pool.run((2, 2), train, case, "zero3", prepare=shaping)
    assert shaped == pool.run((2, 2), train, case, "zero3", in_order=True)


def test_fsdp2_trains_close_with_quantised_collectives(pool: Pool) -> None:
    case = Case(steps=5)
    plain = pool.run((2, 2), train, case, "zero3")[0][0].losses
    for ring, gather, reduce in (("hierarchical", "int8", "int4"), ("ho", "int8", "bf16")):
        shaping: Any = partial(cases.shape, ring=ring, gather=gather, reduce=reduce)
        quantised = pool.run((2, 2), train, case, "zero3", prepare=shaping)[0][0].losses
        assert quantised == pytest.approx(plain, rel=0.01)
        assert quantised != plain, "it was quantised"


def test_groups_of_mixed_dtype_are_left_alone(pool: Pool) -> None:
    assert pool.run((2, 2), cases.mixed_dtype_group) == [True] * 4
