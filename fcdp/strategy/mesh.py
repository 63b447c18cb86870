"""Scopes over which tensors are sharded: none, a pair, a node, all ranks, or any mesh of ranks in a node by nodes.

A cluster has levels, fastest first: 8 ranks in a node and 128 nodes are ``Levels((8, 128))``; sixteen nodes of four
GPUs with two dies each are ``Levels((2, 4, 16))``. On given levels a :class:`Scope`, as written, is a :class:`Mesh`."""

import re
from dataclasses import dataclass, field
from math import prod

from common.errors import UserError, did_you_mean

# PaRO's letters (3.1.1) and groups across switches (3.4), ZeRO-topo's names (V).
_SYMBOLS = {
    "n": "N",
    "none": "N",
    "i": "I",
    "node": "I",
    "g": "G",
    "cluster": "G",
    "pair": "pair",
    "switch": "switch",
}


@dataclass(frozen=True)
class Levels:
    """A cluster's ranks by level, fastest first; the last level counts nodes, all others are inside a node."""

    sizes: tuple[int, ...]
    # Nodes under one leaf switch, if known. Plans do not use it: levels with and without are the same.
    nodes_per_switch: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if len(self.sizes) < 2 or min(self.sizes) < 1:
            raise UserError(
                f"Levels are two or more positive numbers, ranks in a node first and nodes last, not {self}."
            )
        if self.nodes_per_switch is not None and (
            self.nodes_per_switch < 1 or self.nodes % self.nodes_per_switch
        ):
            raise UserError(f"{self.nodes} nodes do not fill switches of {self.nodes_per_switch} each.")

    def __str__(self) -> str:
        return ",".join(map(str, self.sizes))

    @classmethod
    def parse(cls, text: str) -> "Levels":
        """Read ``"8,128"``, or ``"2,4,16"``: two dies in a GPU, four GPUs in a node, sixteen nodes."""
        if not re.fullmatch(r"\s*\d+(\s*,\s*\d+)+\s*", text):
            raise UserError(
                f"{text!r} is not a list of levels. Write ranks per node and nodes (8,128), or 2,4,16 and so on."
            )
        return cls(tuple(int(part) for part in text.split(",")))

    @property
    def ranks_per_node(self) -> int:
        """Ranks in a node: R in AMSP, M in PaRO."""
        return prod(self.sizes[:-1])

    @property
    def nodes(self) -> int:
        """Nodes of the cluster: N in AMSP, g in PaRO."""
        return self.sizes[-1]

    @property
    def world_size(self) -> int:
        return prod(self.sizes)

    @property
    def whole(self) -> "Mesh":
        return Mesh(self.sizes)


@dataclass(frozen=True)
class Mesh:
    """The number of ranks of each level that share one copy of a tensor, by level as in :class:`Levels`."""

    extents: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.ranks_per_node}x{self.nodes}"

    @property
    def shards(self) -> int:
        return prod(self.extents)

    @property
    def ranks_per_node(self) -> int:
        """Ranks in each node that share a copy: s^0 in AMSP."""
        return prod(self.extents[:-1])

    @property
    def nodes(self) -> int:
        """Nodes that share a copy: s^1 in AMSP."""
        return self.extents[-1]

    @property
    def pair(self) -> tuple[int, int]:
        """Ranks per node and nodes that share a copy."""
        return self.ranks_per_node, self.nodes

    def holds(self, other: "Mesh") -> bool:
        """Return whether every group of ``other`` lies in one group of this mesh: this one is as fine, or finer."""
        return all(mine % theirs == 0 for mine, theirs in zip(self.extents, other.extents, strict=True))

    def over(self, other: "Mesh") -> "Mesh":
        """Return the mesh of the ranks with the same place in groups of ``other``, which this mesh holds."""
        return Mesh(tuple(mine // theirs for mine, theirs in zip(self.extents, other.extents, strict=True)))


@dataclass(frozen=True)
class Scope:
    """Ranks over which a tensor is sharded: ``N``, ``pair``, ``I``, ``switch``, ``G``, or ``4x2`` (ranks x nodes)."""

    text: str

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, text: str) -> "Scope":
        """Read a scope; letters and names in any case."""
        word = text.strip().lower()
        if word in _SYMBOLS:
            return cls(_SYMBOLS[word])
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", word)
        if match:
            return cls("N" if match.groups() == ("1", "1") else f"{int(match[1])}x{int(match[2])}")
        raise UserError(
            f"{text!r} is not a scope.{did_you_mean(word, _SYMBOLS)} Write N (not sharded), pair, I (in a node), "
            "switch (all nodes under one), G (over all ranks), or ranks per node x nodes, such as 4x1 or 8x2."
        )

    def on(self, levels: Levels) -> Mesh:
        """Return the mesh that the scope is on a cluster."""
        ones = (1,) * len(levels.sizes)
        if self.text == "N":
            return Mesh(ones)
        if self.text == "G":
            return levels.whole
        if self.text == "I":
            return Mesh((*levels.sizes[:-1], 1))
        if self.text == "pair":
            if len(levels.sizes) < 3:
                with_pairs = f"2,{max(1, levels.ranks_per_node // 2)},{levels.nodes}"
                raise UserError(
                    f"The cluster's levels are {levels}: there is no pair in them. Write 2x1, or, if the cluster is "
                    f"measured or has a file, declare pairs: --levels {with_pairs}."
                )
            return Mesh((levels.sizes[0], *ones[1:]))
        if self.text == "switch":
            if levels.nodes_per_switch is None:
                raise UserError(
                    "It is unknown how many nodes are under one leaf switch, or it is not the same number under each: "
                    "give leaf_of_node in --cluster FILE (in a program: Levels(nodes_per_switch=...)), or write the "
                    f"scope as ranks x nodes, such as {levels.ranks_per_node}x{min(2, levels.nodes)}."
                )
            return Mesh((*levels.sizes[:-1], levels.nodes_per_switch))
        ranks, _, nodes = self.text.partition("x")
        return _fill(int(ranks), int(nodes), levels)


def _fill(ranks: int, nodes: int, levels: Levels) -> Mesh:
    if ranks > levels.ranks_per_node or levels.ranks_per_node % ranks:
        raise UserError(
            f"Scope {ranks}x{nodes}: {ranks} does not divide the {levels.ranks_per_node} ranks of a node, so some "
            "would be left over (AMSP V-B, equations 3 and 5)."
        )
    if nodes > levels.nodes or levels.nodes % nodes:
        raise UserError(
            f"Scope {ranks}x{nodes}: {nodes} does not divide the {levels.nodes} nodes, so some would be left over "
            "(AMSP V-B, equations 4 and 6)."
        )
    if nodes > 1 and ranks != levels.ranks_per_node:
        raise UserError(
            f"Scope {ranks}x{nodes} crosses nodes before it has used the {levels.ranks_per_node} ranks of one "
            f"(AMSP V-B, equation 7). {levels.ranks_per_node}x{nodes} and {ranks * nodes}x1 are what may be meant."
        )
    extents = []
    left = ranks
    for size in levels.sizes[:-1]:
        taken = min(size, left)
        if size % taken or left % taken:
            raise UserError(
                f"Scope {ranks}x{nodes} does not fill the levels {levels} from the fastest one up "
                "(AMSP V-B, equation 7, for the levels inside a node)."
            )
        extents.append(taken)
        left //= taken
    return Mesh((*extents, nodes))
