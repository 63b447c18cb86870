"""Gather and reduce-scatter on strided rows of awkward sizes, against what plain indexing says."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import fcdp
from fcdp.rank_level import RankLevel
from fcdp.traffic import Traffic
from tests.fcdp.pool import Pool

LAYOUTS = [(2, 2), (1, 4), (4, 1), (3, 1)]
CELLS = [1, 7, 199, 4097]


def _gather(topology: fcdp.Topology, cell: int) -> list[bool]:
    """In both levels, every rank ends with every cell."""
    right = []
    everything = torch.arange(topology.nodes * topology.ranks_per_node * cell)
    everything = everything.view(topology.nodes, topology.ranks_per_node, cell)
    for name in ("inside", "across"):
        traffic = Traffic()
        level = RankLevel(lambda: topology.gather_groups, name, "gather", traffic)  # type: ignore[arg-type]
        output = torch.full_like(everything, -1)
        mine = (slice(None), topology.local_rank) if name == "inside" else (topology.node, slice(None))
        output[mine] = everything[mine]
        rows = output if name == "inside" else output.transpose(0, 1)
        level.gather(rows)()
        sent = everything.numel() // level.size * (level.size - 1) * 8
        counted = traffic.gather_inside if name == "inside" else traffic.gather_across
        right.append(torch.equal(output, everything) and counted == sent)
    return right


def _reduce(topology: fcdp.Topology, cell: int) -> list[bool]:
    """In both levels, cells are sums in rank order: ((a + b) + c) + d."""
    right = []
    for name in ("inside", "across"):
        traffic = Traffic()
        level = RankLevel(lambda: topology.reduce_groups, name, "reduce", traffic)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(7)
        everyone = torch.randn(level.size, 3, level.size, cell, generator=generator)
        mine = everyone[level.index].clone()
        output = torch.empty(3, cell)
        level.reduce_scatter(mine, output)
        expected = everyone[0][:, level.index]
        for other in everyone[1:]:
            expected = expected + other[:, level.index]
        right.append(torch.equal(output, expected) and torch.equal(mine, everyone[level.index]))
    return right


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("call", [_gather, _reduce])
def test_rank_level(pool: Pool, layout: tuple[int, int], call: Any) -> None:
    assert all(all(right) for right in pool.run(layout, _sizes, call))


def _sizes(topology: fcdp.Topology, call: Any) -> list[bool]:
    return [right for cell in CELLS for right in call(topology, cell)]


def _topology(topology: fcdp.Topology) -> tuple[int, int, list[list[int]]]:
    groups = topology.gather_groups
    members = [dist.get_process_group_ranks(group) for group in (groups.inside, groups.across) if group is not None]
    return topology.node, topology.local_rank, members


def test_topology_numbers_ranks_node_by_node(pool: Pool) -> None:
    assert pool.run((2, 2), _topology) == [
        (0, 0, [[0, 1], [0, 2]]),
        (0, 1, [[0, 1], [1, 3]]),
        (1, 0, [[2, 3], [0, 2]]),
        (1, 1, [[2, 3], [1, 3]]),
    ]
    assert pool.run((3, 1), _topology) == [(0, 0, [[0, 1, 2]]), (1, 0, [[0, 1, 2]]), (2, 0, [[0, 1, 2]])]
