"""An order of nodes in which those that communicate most are under one leaf switch (AMSP V-D, figure 10).

Consecutive nodes form the groups over which a scope of s^1 nodes shards. Traffic of a group whose nodes hang on one
leaf switch never reaches a spine switch.
"""

import itertools
from collections.abc import Hashable, Sequence

from common.errors import UserError
from fcdp.strategy.strategy import StrategyMeshes


def node_order(leaf_of_node: Sequence[Hashable], group: int) -> list[int]:
    """Return node indices in the order in which to number them: whole groups of every leaf first, then what is left
    over. Node 0, where ranks meet and rank 0 is, stays the first: its group leads the others, and it leads its group.

    Args:
        leaf_of_node: the leaf switch of each node.
        group: s^1, nodes in a group.

    Raises:
        UserError: groups of this size leave nodes over.
    """
    if group < 1 or len(leaf_of_node) % group:
        raise UserError(f"{len(leaf_of_node)} nodes are no whole number of groups of {group}.")
    by_leaf: dict[Hashable, list[int]] = {}
    for node, leaf in enumerate(leaf_of_node):
        by_leaf.setdefault(leaf, []).append(node)
    whole: list[int] = []
    rest: list[list[int]] = []
    for nodes in by_leaf.values():
        kept = len(nodes) // group * group
        whole += nodes[:kept]
        rest.append(nodes[kept:])
    # The largest remainders first: each takes in as few others as it can to make a group.
    rest.sort(key=len, reverse=True)
    order = whole + [node for nodes in rest for node in nodes]
    first = order.index(0) // group * group
    leading = order[first : first + group]
    return [0, *(node for node in leading if node), *order[:first], *order[first + group :]]


def nodes_per_switch(leaves: Sequence[Hashable]) -> int | None:
    """Return how many nodes each leaf switch has, if nodes are numbered switch by switch and all have as many; else
    None. It is what the scope ``switch`` stands for.

    Args:
        leaves: the leaf switch of each node, in order.
    """
    runs = [len(list(run)) for _, run in itertools.groupby(leaves)]
    return runs[0] if len(set(runs)) == 1 and len(runs) == len(set(leaves)) else None


def groups_across_leaves(order: Sequence[int], leaf_of_node: Sequence[Hashable], group: int) -> int:
    """Return how many groups of an order have nodes under more than one leaf switch."""
    starts = range(0, len(order), group)
    return sum(len({leaf_of_node[node] for node in order[start : start + group]}) > 1 for start in starts)


def group_of(layout: StrategyMeshes) -> int:
    """Return the nodes of the smallest group that crosses nodes, which communicates most often; 1 if none does."""
    return min((mesh.nodes for mesh in (layout.p, layout.g, layout.os) if mesh.nodes > 1), default=1)
