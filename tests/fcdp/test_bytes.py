"""Bytes between nodes: counted where messages are sent, and equal to the formulas."""

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

import fcdp
from tests.helpers.fcdp.cases import Case, train
from tests.helpers.fcdp.pool import Pool


def _count(topology: fcdp.Topology, case: Case, **options: Any) -> dict[str, float]:
    """Train with every point-to-point message counted by whether it leaves the node; our own count next to it."""
    sent = {"intra_node": 0, "inter_node": 0}
    send = dist.isend

    def counting(tensor: Any, dst: Any = None, group: Any = None, tag: int = 0, group_dst: Any = None) -> Any:
        to = dist.get_process_group_ranks(group)[group_dst]
        level = "intra_node" if to // topology.ranks_per_node == topology.node else "inter_node"
        sent[level] += tensor.numel() * tensor.element_size()
        return send(tensor, dst, group, tag, group_dst)

    dist.isend = distributed_c10d.isend = counting  # type: ignore[assignment]  # which P2POp compares with
    try:
        _, seen = train(topology, case, "fcdp", inspect=lambda sharding: _look(sharding, case), **options)
    finally:
        dist.isend = distributed_c10d.isend = send  # type: ignore[assignment]
    return {**seen, "sent_intra_node": sent["intra_node"], "sent_inter_node": sent["inter_node"]}


def _look(sharding: fcdp.Sharding, case: Case) -> dict[str, float]:
    traffic = sharding.traffic
    return {
        "inter_node": traffic.inter_node, "intra_node": traffic.gather_intra_node + traffic.reduce_intra_node,
        "first": sharding.inter_node_bytes(case.micro_batches, first_step=True),
        "later": sharding.inter_node_bytes(case.micro_batches), "misses": traffic.misses,
        "groups": len(sharding.groups), "trainable": sum(group.trainable for group in sharding.groups),
        "cache": sharding.host_cache_bytes,
        "model": sum(group.cell_bytes for group in sharding.groups) * sharding.topology.world_size,
    }  # fmt: skip


@pytest.mark.parametrize("layout", [(2, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("case", [
    Case(),
    Case(bf16=True, micro_batches=3, checkpointing=True),
    Case(lora=True),
    Case(lora=True, bf16=True, micro_batches=3, checkpointing=True),
], ids=lambda case: f"{'lora' if case.lora else 'full'}-{case.micro_batches}")  # fmt: skip
@pytest.mark.slow
def test_bytes_across_nodes_are_the_formulas(pool: Pool, layout: tuple[int, int], case: Case) -> None:
    ranks = pool.run(layout, _count, case)
    nodes, per_node = layout
    for node in range(nodes):
        on_node = ranks[node * per_node : (node + 1) * per_node]
        assert (
            sum(rank["sent_inter_node"] for rank in on_node) == on_node[0]["first"] + 4 * on_node[0]["later"]
        )
        assert sum(rank["cache"] for rank in on_node) == on_node[0]["model"], (
            "one copy of the model in every node"
        )
    for rank in ranks:
        assert (rank["inter_node"], rank["intra_node"]) == (rank["sent_inter_node"], rank["sent_intra_node"])
        # All groups in the first step, then the trainable ones, however many micro-batches and recomputations.
        assert rank["misses"] == rank["groups"] + 4 * rank["trainable"]
