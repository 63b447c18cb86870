"""Nodes are numbered switch by switch, on every rank alike, where their switches are known."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from cli.options.settings import Settings
from cli.train.meeting import Placement, leaf_by_slurm, place
from common.files import preset_files
from fcdp.planner.cluster import nodes_per_switch

LEAVES = ("red", "blue", "red", "blue")


def placed(leaves: tuple[str | None, ...], *ranks_per_node: int, **options: Any) -> list[Placement | None]:
    """What every rank agrees on; ``ranks_per_node``: of each node; none: one on each."""
    store = dist.HashStore()
    counts = ranks_per_node or (1,) * len(leaves)
    places = [(node, local) for node, count in enumerate(counts) for local in range(count)]

    def one(rank: int) -> Placement | None:
        node, local = places[rank]
        settings = Settings(model="m", nodes=len(leaves), **options)
        numbers = {"RANK": rank, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": counts[node], "GROUP_RANK": node,
                   "GROUP_WORLD_SIZE": len(leaves)}  # fmt: skip
        leaf = leaves[node]
        slurm = {"SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node", "SLURM_TOPOLOGY_ADDR": f"{leaf}.n{node}"}
        world = {name: str(number) for name, number in numbers.items()}
        return place(settings, store, world | (slurm if leaf else dict(os.environ)))

    with ThreadPoolExecutor(len(places)) as ranks:
        return list(ranks.map(one, range(len(places))))


def test_all_ranks_agree_on_an_order_by_switches() -> None:
    found = placed(LEAVES, 2, 2, 2, 2, strategy="2x2/2x2/G")
    assert len(set(found)) == 1
    placement = found[0]
    assert placement is not None
    assert placement.order == (0, 2, 1, 3) and placement.leaves == ("red", "red", "blue", "blue")
    assert nodes_per_switch(placement.leaves) == 2
    assert str(placement).startswith("4 nodes under 2 leaf switches, numbered ")


@pytest.mark.parametrize("strategy", ["switch/switch/G", "fcdp", "III", "auto", None, "no such"])
def test_any_strategy_has_nodes_switch_by_switch(strategy: str | None) -> None:
    placement = placed(LEAVES, strategy=strategy)[0]
    assert placement is not None and placement.order == (0, 2, 1, 3)


def test_nodes_that_are_in_order_stay_as_they_are() -> None:
    placement = placed(("a", "a", "b"))[0]
    assert placement is not None and nodes_per_switch(placement.leaves) is None
    assert str(placement).startswith("3 nodes under 2 leaf switches, numbered ")


def test_without_all_switches_the_cluster_file_counts_and_else_nothing(tmp_path: Path) -> None:
    assert placed(("a", None, "b", "b"), strategy="fcdp") == [None] * 4
    file = tmp_path / "mine.toml"
    text = preset_files("clusters")["a800-hdr"].read_text().replace("size = 128", "size = 4")
    file.write_text(text.replace("device_memory =", "leaf_of_node = [7, 8, 7, 8]\ndevice_memory ="))
    placement = placed(("a", None, "b", "b"), cluster=str(file))[0]
    assert (
        placement is not None and placement.order == (0, 2, 1, 3) and placement.leaves == ("7", "7", "8", "8")
    )
    assert placed((None, None), cluster=str(file)) == [None, None], "it is about four nodes"


def test_one_node_and_drives_that_hold_a_ranks_data_keep_their_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert placed(("a",), 2) == [None, None]
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR_PATTERN", "switch.node")
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR", "leaf1.gpu1")
    assert placed((None, None))[0] is not None
    assert placed((None, None), ssd=("/nowhere",)) == [None, None]


@pytest.mark.parametrize("ranks_per_node", [(1, 2), (2, 1), (2, 1, 3)])
def test_nodes_with_different_numbers_of_ranks_are_left_to_be_rejected(
    ranks_per_node: tuple[int, ...],
) -> None:
    """Whichever comes first, nobody waits for a node that there is not."""
    assert placed(("a", "b", "a")[: len(ranks_per_node)], *ranks_per_node) == [None] * sum(ranks_per_node)


@pytest.mark.parametrize(("pattern", "address", "leaf"), [
    ("switch.switch.node", "spine1.leaf2.gpu07", "leaf2"),
    ("switch.node", "leaf2.gpu07.cluster.org", "leaf2"),
    ("node", "gpu07", None),  # no topology/tree
    ("block.node", "b1.gpu07", None),
    ("switch.switch.node", "spine1", None),
    ("", "", None),
])  # fmt: skip
def test_slurms_tree_topology_names_the_leaf(pattern: str, address: str, leaf: str | None) -> None:
    assert leaf_by_slurm({"SLURM_TOPOLOGY_ADDR_PATTERN": pattern, "SLURM_TOPOLOGY_ADDR": address}) == leaf
