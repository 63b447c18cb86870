"""Tensor parallelism and FSDP2 in two dimensions: with ours in its place, bit for bit the same, and bytes as computed.

The plain twin is FSDP2 on the same mesh. Both also agree with one process that holds the whole model, but for the order
of additions: tensor parallelism adds the halves of a product, and sharding the means of the ranks.
"""

import pytest

from tests.helpers.fcdp import tensor_parallel_cases as cases
from tests.helpers.fcdp.module_cases import on_nodes_of
from tests.helpers.fcdp.pool import Pool
from tests.helpers.fcdp.tensor_parallel_cases import TwoDimensions


def _check(pool: Pool, run: TwoDimensions, world: tuple[int, int], layout: tuple[int, int]) -> None:
    """Train ``run`` with FSDP2, with ours and in one process, on ``world`` (nodes, ranks in each) and compare."""
    nodes, ranks = world
    plain, ours = (pool.run(world, on_nodes_of, ranks, cases.train, run, which) for which in (False, True))
    assert [(one.losses, one.digest) for one in ours] == [(one.losses, one.digest) for one in plain]
    assert {one.layout for one in ours} == {layout}

    # The one that shares a shard's ranks in a node sends together what the formula says, for each half of the tensors.
    for node in range(nodes):
        sent = sum(one.sent for one in ours[node * ranks : (node + 1) * ranks])
        copies = ranks // layout[1] if layout[0] > 1 else 1
        assert sent == copies * ours[0].formula
    assert (ours[0].formula > 0) == (layout[0] > 1)

    shares = nodes * ranks // 2
    alone = cases.train_alone(run, shares)
    places = [rank // 2 for rank in range(nodes * ranks)]
    if run.tp_outside:
        places = [rank % shares for rank in range(nodes * ranks)]
    for one, place in zip(ours, places, strict=True):
        assert one.losses == pytest.approx(alone.losses[place::shares], rel=1e-5)
    for name, value in alone.weights.items():  # AdamW makes much of a gradient that is nearly zero
        assert float((ours[0].weights[name] - value).norm() / value.norm()) < 1e-3, name
    assert len(set(ours[0].losses)) == cases.STEPS * run.micro_batches


@pytest.mark.parametrize(
    "run", [TwoDimensions(), TwoDimensions(micro_batches=3, accumulate=True)], ids=["1", "3"]
)
@pytest.mark.slow
def test_tensor_parallel_in_the_node_and_sharded_between_nodes(pool: Pool, run: TwoDimensions) -> None:
    _check(pool, run, (2, 2), (2, 1))


@pytest.mark.slow
def test_every_micro_batch_is_reduced(pool: Pool) -> None:
    plain, ours = (
        pool.run((2, 2), on_nodes_of, 2, cases.train, TwoDimensions(micro_batches=2), which)
        for which in (False, True)
    )
    assert [(one.losses, one.digest) for one in ours] == [(one.losses, one.digest) for one in plain]


def test_tensor_parallel_between_nodes_and_sharded_in_the_node(pool: Pool) -> None:
    _check(pool, TwoDimensions(tp_outside=True, micro_batches=2, accumulate=True), (2, 2), (1, 2))


@pytest.mark.parametrize(
    "run", [TwoDimensions(micro_batches=2, accumulate=True), TwoDimensions(strategy="paro-igg")]
)
@pytest.mark.slow
def test_nodes_of_two_shards_with_two_parts_each(pool: Pool, run: TwoDimensions) -> None:
    _check(pool, run, (2, 4), (2, 2))
