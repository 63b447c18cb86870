"""A sharding strategy: over which ranks parameters, gradients and optimizer states are sharded, and how they travel.

Every strategy of PaRO, AMSP, ZeRO-topo and FCDP is a point in one space (``names.py`` names them). P, G and OS (with
fp32 master weights) each have a scope. P is gathered over its scope at every use; G is reduced over its scope by every
micro-batch, and over the rest of the cluster once per step; new parameters are spread from OS's scope to P's once per
step (PaRO 3.3). P's shards are in device memory; with a scope between N and OS's they are a cache, which may be in host
memory (FCDP). A *secondary partition* of P inside the node may be kept from forward to backward (ZeRO++)."""

from dataclasses import dataclass, replace
from typing import Literal

from common.errors import UserError
from common.quantisation import Bits
from fcdp.strategy.mesh import Levels, Mesh, Scope

# where cached shards of P are; adaptive: on the device if there is room
Tier = Literal["none", "device", "host", "adaptive"]

# Across levels: one ring through all ranks, level after level, or all levels at once (PaRO 3.4).
Ring = Literal["flat", "hierarchical", "ho"]

Format = Literal["bf16", "int8", "int4"]
BITS: dict[Format, Bits] = {"int8": 8, "int4": 4}


@dataclass(frozen=True)
class WireFormats:
    """Formats on the network: bf16, or quantised in blocks with a scale each (``common.quantisation``)."""

    gather: Format = "bf16"  # format of P as it is gathered over its scope
    secondary: Format = "bf16"  # format in which the secondary partition of P is kept and gathered
    reduce: Format = "bf16"  # format of G as it is reduced over its scope by every micro-batch

    @property
    def exact(self) -> bool:
        """Whether nothing is quantised."""
        return self == WireFormats()


@dataclass(frozen=True)
class Strategy:
    """A way to shard. Construction checks what can be checked without a cluster, :meth:`on` the rest."""

    name: str
    p: Scope  # scope of parameters in compute precision
    g: Scope  # scope of gradients while micro-batches accumulate
    os: Scope  # scope of optimizer states and fp32 master weights
    secondary: Scope | None = None  # of a secondary partition of P, from forward to backward pass
    cache: Tier | None = None  # of the secondary partition or of P's shards; None: device if there are any
    precision: WireFormats = WireFormats()  # formats in which tensors are sent
    ring: Ring = "flat"

    def __post_init__(self) -> None:
        _check_order(self, self.os.coarser_than(self.p), self.os.coarser_than(self.g), self.g.coarser_than(self.p))
        if self.secondary is not None:
            if self.p.text == "N":
                raise UserError(f"{self.name}: P is not sharded, so a second set of shards saves nothing (FCDP VI-A).")
            if self.secondary.text in ("N", "switch", "G") or (self.secondary.numbers or (0, 1))[1] > 1:
                raise UserError(
                    f"{self.name}: a second set of shards is there to stay inside a node (ZeRO-topo III-C), "
                    f"but its scope is {self.secondary}."
                )
        elif self.precision.secondary != "bf16":
            raise UserError(f"{self.name}: a precision is given for second shards, but there are none.")
        if self.cache not in (None, "none") and self.secondary is None and (self.p.text == "N" or self.p == self.os):
            why = "not sharded" if self.p.text == "N" else f"sharded over {self.p} as OS is"
            raise UserError(
                f"{self.name}: P is {why}, so there is no cache to put in {self.cache} memory. A cache holds a node's "
                "shards of P while OS is sharded more widely, or a second set of shards (FCDP IV-C, VI-A)."
            )
        if self.cache == "none" and self.secondary is not None:
            raise UserError(f"{self.name}: a second set of shards needs a tier: device, host or adaptive.")

    @property
    def scopes(self) -> str:
        """Scopes of P, G and OS in short: ``IGG``, or ``4x1/4x1/8x1``."""
        parts = (self.p.text, self.g.text, self.os.text)
        return "".join(parts) if all(len(part) == 1 for part in parts) else "/".join(parts)

    def on(self, levels: Levels) -> "StrategyMeshes":
        """Return the strategy's meshes on a cluster."""
        p, g, os = self.p.on(levels), self.g.on(levels), self.os.on(levels)
        _check_order(self, not os.holds(p), not os.holds(g), not g.holds(p))
        secondary = None if self.secondary is None else self.secondary.on(levels)
        if p == secondary and self.precision.secondary == "bf16":
            secondary = None  # on one node they are the same shards
        # A node of one rank has all of P in that rank's share: on the device nothing is gained by it.
        own = p.shards < os.shards and (p.shards > 1 or self.cache in ("host", "adaptive"))
        cached = secondary is not None or own
        cache: Tier = (self.cache or "device") if cached else "none"
        if cached and cache == "none":
            cache = "device"
        return StrategyMeshes(self, levels, p, g, os, secondary, cache)

    def without_quantisation(self) -> "Strategy":
        """Return the strategy with everything in bf16."""
        return self if self.precision.exact else replace(self, name=f"{self.name}-exact", precision=WireFormats())


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


def _check_order(strategy: Strategy, os_under_p: bool | None, os_under_g: bool | None, g_under_p: bool | None) -> None:
    """Reject what the papers' dependency rules forbid; None: only a cluster can decide.

    On G against P they differ: AMSP (IV-B) and ZeRO-topo (V) want G as fine as P; PaRO has INI and others (table 1)."""
    for under, other, scope in ((os_under_p, "P", strategy.p), (os_under_g, "G", strategy.g)):
        if under:
            raise UserError(
                f"{strategy.name}: OS ({strategy.os}) is sharded less finely than {other} ({scope}). That costs memory "
                "and saves no communication (PaRO 3.1.3, principle 1; AMSP IV-B, equations 3 and 4)."
            )
    letters = all(scope.text in ("N", "I", "G") for scope in (strategy.p, strategy.g, strategy.os))
    if g_under_p and not letters:
        raise UserError(
            f"{strategy.name}: G ({strategy.g}) is sharded less finely than P ({strategy.p}): ranks would hold "
            "gradients of parameters that are not theirs (AMSP IV-B, equations 3 and 4; ZeRO-topo V). PaRO's INI, ING, "
            "GNG and GIG are the exceptions, and are written in letters."
        )
