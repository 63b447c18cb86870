"""A sharding strategy: over which ranks parameters, gradients and optimizer states are sharded, and how they travel.

Every strategy of PaRO, AMSP, ZeRO-topo and FCDP is a point in one space (:data:`PRESETS`). P, G and OS (with
fp32 master weights) each have a scope. P is gathered over its scope at every use; G is reduced over its scope by every
micro-batch, and over the rest of the cluster once per step; new parameters are spread from OS's scope to P's once per
step (PaRO 3.3). P's shards are in device memory; with a scope between N and OS's they are a cache, which may be in host
memory (FCDP). A *secondary partition* of P inside the node may be kept from forward to backward (ZeRO++)."""

import itertools
import operator
import re
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from common.errors import UserError, did_you_mean
from common.quantization import Bits
from fcdp.strategy.mesh import Levels, Mesh, Scope

# where cached shards of P are; adaptive: on the device if there is room
Tier = Literal["none", "device", "host", "adaptive"]
_TIERS = ("device", "host", "adaptive")

# Across levels: one ring through all ranks, level after level, or all levels at once (PaRO 3.4).
Ring = Literal["flat", "hierarchical", "ho"]

Format = Literal["bf16", "int8", "int4"]
BITS: dict[Format, Bits] = {"int8": 8, "int4": 4}


@dataclass(frozen=True)
class WireFormats:
    """Formats on the network: bf16, or quantized in blocks with a scale each (``common.quantization``)."""

    gather: Format = "bf16"  # format of P as it is gathered over its scope
    secondary: Format = "bf16"  # format in which the secondary partition of P is kept and gathered
    reduce: Format = "bf16"  # format of G as it is reduced over its scope by every micro-batch

    @property
    def exact(self) -> bool:
        """Whether nothing is quantized."""
        return self == WireFormats()


@dataclass(frozen=True)
class Strategy:
    """A way to shard; :meth:`on` checks it on a cluster."""

    name: str
    p: Scope  # scope of parameters in compute precision
    g: Scope  # scope of gradients while micro-batches accumulate
    os: Scope  # scope of optimizer states and fp32 master weights
    secondary: Scope | None = None  # of a secondary partition of P, from forward to backward pass
    cache: Tier = "none"  # of the secondary partition or of P's shards; none: device if there are any
    precision: WireFormats = WireFormats()  # formats in which tensors are sent
    ring: Ring = "flat"

    @property
    def scopes(self) -> str:
        """Scopes of P, G and OS in short: ``IGG``, or ``4x1/4x1/8x1``."""
        parts = (self.p.text, self.g.text, self.os.text)
        return "".join(parts) if all(len(part) == 1 for part in parts) else "/".join(parts)

    def on(self, levels: Levels) -> "StrategyMeshes":
        """Return the strategy's meshes on a cluster.

        Raises:
            UserError: it breaks a rule of the papers, which the error names."""
        p = self.p.on(levels)
        g = self.g.on(levels)
        os = self.os.on(levels)
        secondary = None if self.secondary is None else self.secondary.on(levels)
        self._check(p, g, os, secondary)
        if p == secondary and self.precision.secondary == "bf16":
            secondary = None  # on one node they are the same shards
        # A node of one rank has all of P in that rank's share: on the device nothing is gained by it.
        keeps_shards = p.shards < os.shards and (p.shards > 1 or self.cache in ("host", "adaptive"))
        cache: Tier = "none"
        if secondary is not None or keeps_shards:
            cache = "device" if self.cache == "none" else self.cache
        return StrategyMeshes(self, levels, p, g, os, secondary, cache)

    def _check(self, p: Mesh, g: Mesh, os: Mesh, secondary: Mesh | None) -> None:
        """Reject what the papers' rules forbid.

        On G against P they differ: AMSP (IV-B) and ZeRO-topo (V) want G as fine as P; PaRO has INI and others (table
        1)."""
        for mesh, other, scope in ((p, "P", self.p), (g, "G", self.g)):
            if not os.holds(mesh):
                raise UserError(
                    f"{self.name}: OS ({self.os}) is sharded less finely than {other} ({scope}). That costs memory and "
                    "saves no communication (PaRO 3.1.3, principle 1; AMSP IV-B, equations 3 and 4)."
                )
        if not g.holds(p) and not all(scope.text in ("N", "I", "G") for scope in (self.p, self.g, self.os)):
            raise UserError(
                f"{self.name}: G ({self.g}) is sharded less finely than P ({self.p}): ranks would hold gradients of "
                "parameters that are not theirs (AMSP IV-B, equations 3 and 4; ZeRO-topo V). PaRO's INI, ING, GNG and "
                "GIG are the exceptions, and are written in letters."
            )
        if secondary is not None and self.p.text == "N":
            raise UserError(
                f"{self.name}: P is not sharded, so a second set of shards saves nothing (FCDP VI-A)."
            )
        if secondary is not None and (secondary.nodes > 1 or str(self.secondary) == "N"):
            raise UserError(
                f"{self.name}: a second set of shards is there to stay inside a node (ZeRO-topo III-C), but its scope "
                f"is {self.secondary}."
            )
        if self.cache != "none" and secondary is None and (self.p.text == "N" or self.p == self.os):
            why = "not sharded" if self.p.text == "N" else f"sharded over {self.p} as OS is"
            raise UserError(
                f"{self.name}: P is {why}, so there is no cache to put in {self.cache} memory. A cache holds a node's "
                "shards of P while OS is sharded more widely, or a second set of shards (FCDP IV-C, VI-A)."
            )

    def without_quantization(self) -> "Strategy":
        """Return the strategy with everything in bf16."""
        return (
            self
            if self.precision.exact
            else replace(self, name=f"{self.name}-exact", precision=WireFormats())
        )


@dataclass(frozen=True)
class StrategyMeshes:
    """A strategy on a cluster: its scopes as meshes."""

    strategy: Strategy
    levels: Levels
    p: Mesh
    g: Mesh
    os: Mesh
    secondary: Mesh | None
    cache: Tier  # tier of the cache; ``none`` where nothing is cached on this cluster

    @property
    def p_in_cache(self) -> bool:
        """Whether P's own shards are the cache, so that a device holds no more of P than OS's ranks do."""
        return self.secondary is None and self.cache in ("host", "adaptive")


# Routes. Ranks are numbered level by level, fastest first, and a scope crosses a level only when it has filled the
# faster ones (AMSP V-B, equations 5 to 7). So every scope is a *block* of consecutive ranks, and every collective works
# on the ranks between two sizes of blocks. An :class:`Axis` is a step of it: ranks ``stride`` apart, ``size`` of them.
#
#                      1 .. P            P .. OS           OS .. all
#     parameters       gather            spread
#     gradients        1 .. G: reduce    G .. OS: finish   replicate


@dataclass(frozen=True)
class Axis:
    """Ranks that exchange data in one step: ``size`` of them, ``stride`` apart, in one block of consecutive ranks."""

    stride: int
    size: int

    def index(self, rank: int) -> int:
        """Return the place of ``rank`` on its line of the axis."""
        return rank // self.stride % self.size

    def line(self, rank: int) -> list[int]:
        """Return the ranks on the line of ``rank``, in order."""
        first = rank - self.index(rank) * self.stride
        return [first + step * self.stride for step in range(self.size)]

    def crosses_nodes(self, ranks_per_node: int) -> bool:
        """Return whether ranks of different nodes are on one line."""
        return self.stride * self.size > ranks_per_node

    def mixes_levels(self, ranks_per_node: int) -> bool:
        """Return whether ranks of one node and of others are on one line."""
        return self.stride < ranks_per_node < self.stride * self.size


def axes_between(low: int, high: int, levels: Levels, ring: Ring) -> tuple[Axis, ...]:
    """Return the axes between blocks of ``low`` and of ``high`` ranks, fastest first: one per level (leaf switches
    count if known, PaRO 3.4), or one for all with a flat ring."""
    borders = [low]
    if ring != "flat":
        blocks = list(itertools.accumulate(levels.sizes, operator.mul))
        blocks.insert(-1, levels.ranks_per_node * (levels.nodes_per_switch or 1))
        borders += [block for block in dict.fromkeys(blocks) if low < block < high]
    borders.append(high)
    return tuple(Axis(start, stop // start) for start, stop in itertools.pairwise(borders) if stop > start)


@dataclass(frozen=True)
class Routes:
    """The axes of a layout's collectives, fastest first: reductions follow them, gathers go the other way."""

    layout: StrategyMeshes
    gather: tuple[Axis, ...]  # axes along which P is gathered from its shards, at every use
    spread: tuple[Axis, ...]  # from OS's ranks to P's shards, at the first use after each step
    secondary: tuple[Axis, ...]  # P from the secondary partition, in the backward pass
    reduce: tuple[Axis, ...]  # axes along which G is reduced over its scope, by every micro-batch
    finish: tuple[Axis, ...]  # axes along which G is reduced to OS's scope, once per step
    # Axes along which G is reduced over the replicas of OS's shards, once per step
    replicate: tuple[Axis, ...]

    @classmethod
    def of(cls, layout: StrategyMeshes) -> "Routes":
        """Return the routes of ``layout``."""
        p = layout.p.shards
        g = layout.g.shards
        os = layout.os.shards
        secondary = 1 if layout.secondary is None else layout.secondary.shards

        def between(low: int, high: int) -> tuple[Axis, ...]:
            return axes_between(low, high, layout.levels, layout.strategy.ring)

        reduce = between(1, g)
        if layout.strategy.precision.reduce != "bf16":
            # Every hop quantizes again: one for all levels inside the node (ZeRO-topo V-D), and one beyond.
            levels = Levels((layout.levels.ranks_per_node, layout.levels.nodes))
            reduce = axes_between(1, g, levels, "hierarchical")
        return cls(
            layout,
            gather=between(1, p),
            spread=between(p, os),
            secondary=between(1, secondary),
            reduce=reduce,
            finish=between(g, os),
            replicate=between(os, layout.levels.world_size),
        )

    @property
    def shards(self) -> int:
        """Number of ranks over which FSDP2 shards: OS's."""
        return self.layout.os.shards

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same shard."""
        return self.layout.levels.world_size // self.shards

    @property
    def keeps_gathered(self) -> bool:
        """Whether P is not sharded, so that gathered parameters stay until they change."""
        return self.layout.p.shards == 1 and not self.layout.p_in_cache

    @property
    def caches_shards(self) -> bool:
        """Whether ranks keep P's shards besides their shards of OS: P is sharded, and less finely than OS."""
        return self.layout.p.shards < self.shards and not self.keeps_gathered


AUTO = "auto"  # the name that leaves the choice to the planner
ALIASES = {"hsdp": "mics", "hybrid": "mics"}  # FSDP's hybrid sharding, under its two names
# Scopes of P, G and OS of PaRO's table 1: OS is sharded at least as finely as P and as G (3.1.3, principle 1).
PARO = tuple(
    p + g + os
    for p, g, os in itertools.product("NIG", repeat=3)
    if max(map("NIG".index, (p, g))) <= "NIG".index(os)
)


def _preset(name: str, scopes: str, **options: Any) -> Strategy:
    p, g, os = map(Scope.parse, scopes.split("/") if "/" in scopes else scopes)
    return Strategy(name, p, g, os, **options)


# ZeRO-topo (V): int8 gathers, int4 reductions, and an int8 secondary partition.
_TOPO: dict[str, Any] = {"precision": WireFormats("int8", "int8", "int4"), "ring": "hierarchical"}
_PLAIN = (
    _preset("ddp", "NNN"),
    _preset("zero1", "NNG"),
    _preset("zero2", "NGG"),
    _preset("zero3", "GGG"),
    _preset("mics", "III", ring="hierarchical"),
    # ZeRO++ (ZeRO-topo III-C): int8 gathers, a secondary partition in the node, int4 all-to-all reductions.
    _preset(
        "zero++",
        "GGG",
        secondary=Scope("I"),
        precision=WireFormats("int8", "bf16", "int4"),
        ring="hierarchical",
    ),
    # FCDP: P's shards in host memory. The second sums gradients inside the node while micro-batches accumulate, as
    # PaRO does: fewer bytes between nodes for more device memory.
    _preset("fcdp", "IGG", ring="hierarchical", cache="adaptive"),
    _preset("fcdp-iig", "IIG", ring="hierarchical", cache="adaptive"),
    *(_preset(f"paro-{scopes.lower()}", scopes, ring="ho") for scopes in PARO),
    # AMSP's choices (table IV).
    _preset("amsp-7b", "1x1/1x1/8x1"),
    _preset("amsp-13b", "4x1/4x1/8x1"),
    _preset("amsp-30b", "8x1/8x1/8x4"),
    # Secondary partitions over the pair, or over the eight GCDs of a node (tables V and VII: "Sec-Degree=8").
    _preset("zero-topo", "pair/I/G", secondary=Scope("pair"), **_TOPO),
    _preset("zero-topo-8", "pair/I/G", secondary=Scope("8x1"), **_TOPO),
)
# Strategies by name. Those that quantize have a twin that does not, with ``-exact`` appended.
PRESETS = {each.name: each for each in (*_PLAIN, *(strategy.without_quantization() for strategy in _PLAIN))}


def parse_strategy(text: str) -> Strategy:
    """Return the strategy that a user names.

    ``text`` is a preset (``zero3``, ``paro-iig``), three letters (``IGG``), or three scopes (``I/G/G``,
    ``4x1/4x1/8x1``). To scopes, ``+device``, ``+host`` or ``+adaptive`` adds the tier of the cache, and ``+second`` a
    secondary partition over the node, ``+second=pair``, ``+second=2`` or ``+second=2x1`` one over a part of it."""
    name = text.strip().lower()
    name = ALIASES.get(name, name)
    if name in PRESETS:
        return PRESETS[name]
    scopes, *extras = name.split("+")
    if scopes in PRESETS:
        raise UserError(
            f"{text!r}: a preset comes with its cache. Write scopes instead, such as I/G/G+{extras[0]}."
        )
    if re.fullmatch(r"[nig]{3}", scopes):
        scopes = "/".join(scopes)
    parts = scopes.split("/")
    if len(parts) != 3:
        raise UserError(_unknown(text))
    p, g, os = (Scope.parse(part) for part in parts)
    secondary: Scope | None = None
    cache: Tier = "none"
    for extra in extras:
        word, _, degree = extra.partition("=")
        if word == "second":
            secondary = Scope.parse(f"{degree}x1" if degree.isdigit() else degree or "node")
        elif extra in _TIERS:
            cache = cast(Tier, extra)
        else:
            known = (*_TIERS, "second")
            raise UserError(f"{text!r}: {extra!r} is not a cache tier.{did_you_mean(extra, known)}")
    written = "+".join(["/".join(map(str, (p, g, os))), *extras])
    return Strategy(written, p, g, os, secondary=secondary, cache=cache, ring="hierarchical")


def _unknown(text: str) -> str:
    hint = did_you_mean(text.strip().lower(), [*PRESETS, *ALIASES, AUTO])
    return (
        f"There is no strategy {text!r}.{hint} Name one ({', '.join(n for n in PRESETS if not n.startswith('paro-'))}, "
        f"paro-nnn to paro-ggg, {AUTO}), or write P/G/OS: I/G/G, 4x1/4x1/8x1."
    )
