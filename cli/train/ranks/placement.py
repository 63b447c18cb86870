"""Numbering nodes so that those under one leaf switch come in a row (AMSP V-D), before ranks connect.

The launchers number nodes by their addresses, which say nothing about switches. Rank 0 decides on another order and
tells the others by way of the store. Node 0 keeps its number: the store is there.
"""

import contextlib
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from cli.options.settings import Settings
from common.errors import UserError
from common.units import counted
from fcdp.planner import load_cluster
from fcdp.planner.cluster import group_of, groups_across_leaves, node_order, nodes_per_switch
from fcdp.strategy.mesh import Levels
from fcdp.strategy.names import AUTO, parse_strategy


@dataclass(frozen=True)
class Placement:
    """How nodes are numbered, where their leaf switches are known."""

    order: tuple[int, ...]  # The launchers' numbers of the nodes, by the number that each has now
    leaves: tuple[str, ...]  # Leaf switch of each node, by the number that it has now
    hosts: tuple[str, ...]  # Name of each node, by the number that it has now
    group: int  # Nodes in a group of the strategy's that crosses nodes; 1: not known yet, or there is none

    @property
    def nodes_per_switch(self) -> int | None:
        """Nodes under each leaf switch, for the scope ``switch``; None where that is not one number."""
        return nodes_per_switch(self.leaves)

    def __str__(self) -> str:
        switches = counted(len(set(self.leaves)), "leaf switch", "leaf switches")
        moved = self.order != tuple(range(len(self.order)))
        done = f"numbered {' '.join(self.hosts)}" if moved else "in the order that they had"
        if self.group == 1:
            return f"{len(self.hosts)} nodes under {switches}, {done}"
        groups = len(self.hosts) // self.group
        crossing = groups_across_leaves(range(len(self.leaves)), self.leaves, self.group)
        return (
            f"{len(self.hosts)} nodes under {switches}, {done}: {groups - crossing} of {groups} groups of "
            f"{self.group} nodes stay under one"
        )


def place(settings: Settings, store: dist.Store, world: Mapping[str, str] = os.environ) -> Placement | None:
    """Agree with all ranks on the numbers of nodes. Collective.

    Args:
        settings: of the run. Out of core nodes keep their numbers, to which their drives belong: each exchanges with
            all others directly, so that order would change nothing.
        store: of this start of the run.
        world: the variables with which the launcher has numbered this rank and its node.

    Returns:
        None where switches are not known, or nodes have different numbers of ranks, which is refused once they are
        connected.
    """
    node, nodes = int(world["GROUP_RANK"]), int(world["GROUP_WORLD_SIZE"])
    if settings.ssd or nodes == 1:
        return None
    if world["LOCAL_RANK"] == "0":
        own = leaf_by_slurm(world) or ""
        store.set(f"leaf{node}", json.dumps([own, socket.gethostname(), int(world["LOCAL_WORLD_SIZE"])]))
    if world["RANK"] == "0":
        there = [json.loads(store.get(f"leaf{each}")) for each in range(nodes)]
        store.set("placement", json.dumps(_decide(settings, there)))
    decided = json.loads(store.get("placement"))
    if decided is None:
        return None
    order, leaves, hosts, group = decided
    return Placement(tuple(order), tuple(leaves), tuple(hosts), group)


def leaf_by_slurm(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return this node's leaf switch by Slurm's ``topology/tree`` (srun(1), SLURM_TOPOLOGY_ADDR); None if none.

    The address goes from the top switch to the node: ``spine1.leaf2.gpu07``, with the pattern ``switch.switch.node``.
    """
    kinds = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    names = environment.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    if len(kinds) < 2 or kinds[-2:] != ["switch", "node"] or len(names) < len(kinds):
        return None
    return names[len(kinds) - 2]  # a node's own name may have dots


def _decide(settings: Settings, there: list[tuple[str, str, int]]) -> list[object] | None:
    leaves, hosts, ranks_per_node = map(list, zip(*there, strict=True))
    if len(set(ranks_per_node)) > 1:
        return None
    if not all(leaves):
        leaves = _leaves_of_cluster(settings, len(there))
    if not leaves:
        return None
    switches = nodes_per_switch([leaves[node] for node in node_order(leaves, 1)])
    group = _group(settings, Levels((ranks_per_node[0], len(there)), nodes_per_switch=switches))
    order = node_order(leaves, group)
    return [order, [leaves[node] for node in order], [hosts[node] for node in order], group]


def _leaves_of_cluster(settings: Settings, nodes: int) -> list[str]:
    """Return the leaf switches that the description of the cluster has; none where it has none for these nodes."""
    if settings.cluster in (None, AUTO):
        return []
    leaves = load_cluster(settings.cluster).leaf_of_node or ()
    return [str(leaf) for leaf in leaves] if len(leaves) == nodes else []


def _group(settings: Settings, levels: Levels) -> int:
    """Return the nodes of the strategy's smallest group that crosses nodes; 1 where the planner is yet to choose."""
    if settings.strategy not in (None, AUTO):
        with contextlib.suppress(UserError):  # it is refused later, on all ranks
            return group_of(parse_strategy(settings.strategy).on(levels))
    return 1
