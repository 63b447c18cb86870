"""Gather and reduce-scatter along axes of awkward sizes, against what plain indexing says."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import fcdp
from fcdp.comms.rank_level import FlatRing, RankLevel
from fcdp.strategy.mesh import Levels
from fcdp.strategy.strategy import Axis, axes_between
from fcdp.traffic import Traffic
from tests.helpers.fcdp.pool import Pool

CELLS = [1, 7, 199, 4097]
INSIDE, ACROSS, RING = Axis(1, 2), Axis(2, 2), Axis(1, 4)


def _level(topology: fcdp.Topology, axis: Axis, purpose: Any) -> tuple[RankLevel, Traffic]:
    traffic = Traffic()
    kind = FlatRing if axis.mixes_levels(topology.ranks_per_node) else RankLevel
    return kind(topology, axis, purpose, traffic), traffic


def _gather(topology: fcdp.Topology, axis: Axis, cell: int) -> tuple[bool, int]:
    """Every rank ends with every cell, of contiguous rows as of strided ones."""
    level, traffic = _level(topology, axis, "gather")
    right = True
    for rows in (
        torch.empty(3, axis.size, cell),
        torch.empty(3, axis.size, 2, cell)[:, :, 1],
        torch.empty(1, 4, cell),
    ):
        if rows.size(1) == axis.size:
            everything = torch.randn(rows.shape, generator=torch.Generator().manual_seed(5))
            rows[:, level.index] = everything[:, level.index]
            level.gather(rows)()
            right = right and torch.equal(rows, everything)
    return right, traffic.gather_inter_node


def _reduce(topology: fcdp.Topology, axis: Axis, cell: int) -> tuple[bool, int]:
    """Cells are sums in rank order, ((a + b) + c) + d; round a ring, in the ring's order that ends at their rank."""
    level, traffic = _level(topology, axis, "reduce")
    everyone = torch.randn(level.size, 3, level.size, cell, generator=torch.Generator().manual_seed(7))
    mine = everyone[level.index].clone()
    output = torch.empty(3, cell)
    level.reduce_scatter(mine, output)
    first = level.index + 1 if isinstance(level, FlatRing) else 0
    order = [(first + step) % level.size for step in range(level.size)]
    expected = everyone[order[0]][:, level.index]
    for other in order[1:]:
        expected = expected + everyone[other][:, level.index]
    return torch.equal(output, expected) and torch.equal(
        mine, everyone[level.index]
    ), traffic.reduce_inter_node


def _sizes(topology: fcdp.Topology, call: Any, axis: Axis) -> list[tuple[bool, int]]:
    return [call(topology, axis, cell) for cell in CELLS]


@pytest.mark.parametrize(("layout", "axis"), [
    ((2, 2), INSIDE), ((2, 2), ACROSS), ((2, 2), RING), ((1, 4), RING), ((4, 1), RING), ((3, 1), Axis(1, 3)),
])  # fmt: skip
def test_along_an_axis(pool: Pool, layout: tuple[int, int], axis: Axis) -> None:
    for call, rows in ((_gather, 3 + 3 + (axis.size == 4)), (_reduce, 3)):
        ranks = pool.run(layout, _sizes, call, axis)
        assert all(right for sizes in ranks for right, _ in sizes)
        if axis.mixes_levels(layout[1]):
            # One rank of each node sends to the next one's: three of the four cells of every row.
            assert [[sent // 4 for _, sent in sizes] for sizes in ranks[:2]] == [
                [0] * len(CELLS), [rows * 3 * cell for cell in CELLS]
            ]  # fmt: skip
        else:
            crosses = axis.crosses_nodes(layout[1])
            assert all(
                sent == crosses * rows * (axis.size - 1) * cell * 4
                for sizes in ranks
                for cell, (_, sent) in zip(CELLS, sizes, strict=True)
            )


def _members(topology: fcdp.Topology) -> list[list[int]]:
    return [dist.get_process_group_ranks(topology.group(axis, "gather")) for axis in (INSIDE, ACROSS, RING)]


def test_process_groups_are_the_lines_of_axes(pool: Pool) -> None:
    whole = [0, 1, 2, 3]
    assert pool.run((2, 2), _members) == [
        [[0, 1], [0, 2], whole], [[0, 1], [1, 3], whole], [[2, 3], [0, 2], whole], [[2, 3], [1, 3], whole],
    ]  # fmt: skip


def test_axes_follow_levels_and_flat_rings_do_not() -> None:
    levels = Levels((2, 4, 16))
    assert axes_between(1, 128, levels, "hierarchical") == (Axis(1, 2), Axis(2, 4), Axis(8, 16))
    assert axes_between(4, 32, levels, "ho") == (Axis(4, 2), Axis(8, 4))
    assert axes_between(4, 32, levels, "flat") == (Axis(4, 8),)
    assert axes_between(8, 8, levels, "hierarchical") == ()
    assert [Axis(2, 4).line(rank) for rank in (4, 1, 14, 9)] == [
        [0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15],
    ]  # fmt: skip
    assert [Axis(2, 4).index(rank) for rank in range(9)] == [0, 0, 1, 1, 2, 2, 3, 3, 0]
