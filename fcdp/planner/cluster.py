"""The cluster that a plan is for: a preset with its sources (``configs/clusters``), or a profile that was measured."""

import itertools
import json
import tomllib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.errors import UserError, did_you_mean
from common.files import preset_files
from common.units import parse_bytes
from fcdp.planner.collectives import AlphaBeta, Link, MeasuredRates
from fcdp.strategy.mesh import Levels
from fcdp.strategy.strategy import StrategyMeshes


@dataclass(frozen=True)
class Cluster:
    """The hardware of a cluster: memory, computing and links."""

    name: str
    title: str
    levels: Levels
    device_memory_bytes: int  # memory of one device
    host_memory_bytes: int  # host memory of one node
    flops_per_second: float  # FLOPs per second that training reaches on one device while nothing waits for the network
    memory_bytes_per_second: float  # bandwidth of the device's own memory, which bounds an optimizer step
    host_link_bytes_per_second: float  # to or from host memory, while all devices of the node copy
    rates: AlphaBeta | MeasuredRates
    peak_flops_per_second: float | None = None  # of dense bf16 products, if known
    overlaps: bool = True  # whether devices compute while they communicate, as CPUs do not
    leaf_of_node: tuple[int, ...] | None = None  # if known

    def resized(self, levels: Levels) -> "Cluster":
        """Return the same hardware with other numbers of ranks and nodes."""
        if levels == self.levels:
            return self
        if not isinstance(self.rates, AlphaBeta):
            raise UserError(f"{self.name} was measured with levels {self.levels}; for {levels} there are no times.")
        if len(levels.sizes) != len(self.levels.sizes):
            raise UserError(
                f"{self.name} has {len(self.levels.sizes)} levels ({self.levels}), but {levels} are "
                f"{len(levels.sizes)}. Give as many."
            )
        *inner, outer = self.rates.links
        share = self.levels.ranks_per_node / levels.ranks_per_node
        links = (*inner, replace(outer, bytes_per_second=outer.bytes_per_second * share))
        leaves = self.leaf_of_node if levels.nodes == self.levels.nodes else None
        return replace(self, levels=levels, rates=replace(self.rates, links=links), leaf_of_node=leaves)


def cluster_names() -> list[str]:
    return sorted(preset_files("clusters"))


def load_cluster(name: str) -> Cluster:
    """Return the cluster called ``name``: a preset, a file written like one (``.toml``), or a profile's file."""
    presets = preset_files("clusters")
    if name in presets:
        return _read_preset(name, tomllib.loads(presets[name].read_text(encoding="utf-8")))
    path = Path(name).expanduser()
    if path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
            if path.suffix == ".toml":
                return _read_preset(path.stem, tomllib.loads(text))
            return _read_profile(path.name, json.loads(text))
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            what = "does not describe a cluster" if path.suffix == ".toml" else "is not a cluster's profile"
            raise UserError(f"{path} {what}: {type(error).__name__}: {error}.") from error
    hint = did_you_mean(name, presets) or f" There are {', '.join(sorted(presets))}."
    raise UserError(f"{name!r} is neither a cluster preset nor the file of a cluster's profile.{hint}")


def _read_preset(name: str, fields: dict[str, Any]) -> Cluster:
    sections: Sequence[dict[str, Any]] = fields["level"]
    levels = Levels(tuple(section["size"] for section in sections))
    links = []
    for section in sections:
        per_node = section.get("gb_per_s_per_node")
        rate = section["gb_per_s"] if per_node is None else per_node / levels.ranks_per_node
        links.append(Link(rate * 1e9, section["latency_us"] * 1e-6))
    leaves = fields.get("leaf_of_node")
    if leaves is not None and len(leaves) != levels.nodes:
        raise UserError(f"{name}: leaf_of_node has {len(leaves)} entries for {levels.nodes} nodes.")
    return Cluster(
        name=name,
        title=fields["name"],
        levels=_with_switches(levels, leaves),
        device_memory_bytes=parse_bytes(fields["device_memory"]),
        host_memory_bytes=parse_bytes(fields["host_memory"]),
        flops_per_second=fields["bf16_tflops"] * fields["reached"] * 1e12,
        peak_flops_per_second=fields["bf16_tflops"] * 1e12,
        memory_bytes_per_second=fields["memory_gb_per_s"] * 1e9,
        host_link_bytes_per_second=fields["host_link_gb_per_s"] * 1e9,
        rates=AlphaBeta(tuple(links), fields["start_us"] * 1e-6),
        leaf_of_node=None if leaves is None else tuple(leaves),
    )


def _with_switches(levels: Levels, leaves: Sequence[int] | None) -> Levels:
    """Return the levels with the nodes of each leaf switch, once nodes are numbered switch by switch."""
    if not leaves:
        return levels
    return replace(levels, nodes_per_switch=nodes_per_switch([leaves[node] for node in node_order(leaves, 1)]))


def _read_profile(name: str, facts: dict[str, Any]) -> Cluster:
    """Read a profile: fields of ``Cluster`` by name, levels as a list, and ``collectives`` (see ``MeasuredRates``)."""
    numbers = ("flops_per_second", "memory_bytes_per_second", "host_link_bytes_per_second")
    return Cluster(
        name=name,
        title=facts.get("title", name),
        levels=_with_switches(Levels(tuple(facts["levels"])), facts.get("leaf_of_node")),
        device_memory_bytes=int(facts["device_memory_bytes"]),
        host_memory_bytes=int(facts["host_memory_bytes"]),
        **{number: float(facts[number]) for number in numbers},
        rates=MeasuredRates.from_facts(facts),
        overlaps=bool(facts.get("overlaps", True)),
        leaf_of_node=tuple(facts["leaf_of_node"]) if facts.get("leaf_of_node") else None,
    )


def node_order(leaf_of_node: Sequence[Hashable], group: int) -> list[int]:
    """Return node indices in the order in which to number them (AMSP V-D, figure 10): consecutive nodes form groups of
    ``group``, whose traffic never reaches a spine switch under one leaf switch. First whole groups of every leaf, then
    the rest; but node 0, where ranks meet, stays the first with its group."""
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
    """Return how many nodes each leaf switch has, the scope ``switch``; None: not as many each, or not in a row."""
    runs = [len(list(run)) for _, run in itertools.groupby(leaves)]
    return runs[0] if len(set(runs)) == 1 and len(runs) == len(set(leaves)) else None


def groups_across_leaves(order: Sequence[int], leaf_of_node: Sequence[Hashable], group: int) -> int:
    """Return how many groups of an order have nodes under more than one leaf switch."""
    starts = range(0, len(order), group)
    return sum(len({leaf_of_node[node] for node in order[start : start + group]}) > 1 for start in starts)


def group_of(layout: StrategyMeshes) -> int:
    """Return the nodes of the smallest group that crosses nodes, which communicates most often; 1 if none does."""
    return min((mesh.nodes for mesh in (layout.p, layout.g, layout.os) if mesh.nodes > 1), default=1)
