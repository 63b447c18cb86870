"""HO-Ring and quantized levels, against plain twins, in awkward sizes; and training with quantized strategies."""

import pytest
import torch

from tests.helpers.fcdp import collective_cases as cases
from tests.helpers.fcdp.pool import Pool
from tests.helpers.fcdp.strategy_cases import Run, train_all

LAYOUTS = [
    (2, 2),
    *(pytest.param(layout, marks=pytest.mark.slow) for layout in ((4, 1), (1, 4))),
    (3, 1),
    (2, 2, 2),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_level_on_every_layout(pool: Pool, layout: tuple[int, ...]) -> None:
    pool.run(layout, cases.ho_ring)
    for bits, dtype in ((8, torch.bfloat16), (4, torch.float32), (8, torch.uint8)):
        pool.run(layout, cases.gather_quantized, bits, dtype)
    for bits in (8, 4):
        pool.run(layout, cases.reduce_quantized, bits)


@pytest.mark.slow
def test_quantized_strategies_train_close_to_exact_ones(pool: Pool) -> None:
    run = Run(micro_batches=(1, 2, 1, 1, 2))
    for layout, name in (((2, 2), "zero++"), ((2, 2, 2), "zero-topo"), ((1, 4, 2), "zero-topo-8")):
        ranks = pool.run(layout, train_all, [name, f"{name}-exact"], run)
        for rank in ranks:
            assert rank[name].losses == pytest.approx(rank[f"{name}-exact"].losses, rel=0.02)
            assert rank[name].losses != rank[f"{name}-exact"].losses, "it was quantized"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_of_mixed_dtype_are_left_alone(pool: Pool, dtype: torch.dtype) -> None:
    for error, mixed in pool.run((2, 2, 2), cases.frozen_weights, dtype):
        assert mixed == (dtype == torch.bfloat16)
        assert error == 0 if mixed else 0 < error < 0.01
