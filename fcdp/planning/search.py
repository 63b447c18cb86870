"""The planner: every admissible strategy, what each costs, and the fastest that fits (AMSP section V)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from common.errors import UserError
from common.units import format_bytes
from fcdp.mesh import Levels, Mesh, Scope
from fcdp.planning.cluster import Cluster
from fcdp.planning.estimate import Estimate, estimate
from fcdp.planning.workload import Workload
from fcdp.strategy import Layout, Strategy, Tier
from fcdp.strategy_names import PARO, PRESETS

Objective = Literal["step", "communication"]

SAME = 0.01
"""Step times closer than this part are the same as far as a model of them can tell."""


@dataclass(frozen=True)
class Plan:
    """All strategies, the best first."""

    estimates: tuple[Estimate, ...]
    choice: Estimate | None
    """The best that fits and changes no arithmetic. None: nothing fits."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        chosen = None if self.choice is None else self.choice.as_dict()
        return {"choice": chosen, "strategies": [found.as_dict() for found in self.estimates]}


def meshes(levels: Levels) -> list[Scope]:
    """Scopes that pass AMSP's filters (V-B): they divide ranks and nodes without rest (equations 5 and 6), and take all
    ranks of a node before a second node (equation 7). From none to all."""
    inner = [f"{ranks}x1" for ranks in range(1, levels.ranks_per_node + 1) if _fits(f"{ranks}x1", levels)]
    outer = [f"{levels.ranks_per_node}x{nodes}" for nodes in range(2, levels.nodes + 1) if levels.nodes % nodes == 0]
    return [Scope(text) for text in (*inner, *outer)]


def admissible(levels: Levels) -> list[Strategy]:
    """Every strategy that the papers' rules leave: AMSP's meshes, PaRO's four that AMSP's rule excludes, each with every
    tier of a cache that makes sense, second shards inside the node, and the presets."""
    found: dict[tuple[object, ...], Strategy] = {}

    def add(strategy: Strategy) -> None:
        # Preferred first: a preset's name where there is one for this point of the space.
        layout = strategy.on(levels)
        key = (layout.p, layout.g, layout.os, layout.second, layout.cache, strategy.precision, strategy.ring)
        found.setdefault(key, strategy)

    for preset in PRESETS.values():
        if _on(preset, levels):
            add(preset)
    scopes = meshes(levels)
    node = levels.ranks_per_node
    for p, g, os in product(scopes, repeat=3):
        if not (_holds(os, g, levels) and _holds(g, p, levels)):
            continue  # equations 3 and 4
        for ring, cache in product(("flat", "hierarchical"), ("device", "host", "adaptive")):
            strategy = _named(p, g, os, cache, ring)
            if strategy is not None:
                add(strategy)
            if (p.numbers or (1, 1))[1] > 1 and node > 1 and cache != "adaptive":
                name = f"{p}/{g}/{os}+{cache}-second"
                add(Strategy(name, p, g, os, second=Scope("I"), cache=cache, ring=ring))  # type: ignore[arg-type]
    for letters in PARO:
        p, g, os = (Scope(letter) for letter in letters)
        for cache in ("device", "host", "adaptive"):
            strategy = _named(p, g, os, cache, "hierarchical")
            if strategy is not None:
                add(strategy)
    return list(found.values())


def plan(
    workload: Workload,
    cluster: Cluster,
    *,
    strategies: Sequence[Strategy] | None = None,
    objective: Objective = "step",
    allow_quantised: bool = False,
    checkpointing: bool | None = None,
    select_and_drop: bool = False,
    overlap_spread: bool = True,
) -> Plan:
    """Cost every strategy and choose: exhaustive, since the rules leave few (AMSP V-B).

    Args:
        strategies: those to choose from. None: all that are admissible.
        objective: ``step``: the time of a step; among those within :data:`SAME` of the fastest, the one with the least
            communication, because what is hidden today need not be tomorrow, and then the least memory.
            ``communication``: AMSP's equation 1, which leaves overlap out.
        allow_quantised: whether a strategy that quantises may be chosen. All are listed either way.
        checkpointing: None: only where a strategy does not fit without.
        select_and_drop: reduce as AMSP does.
        overlap_spread: see :func:`estimate`.
    """

    def cost(layout: Layout) -> Estimate:
        def at(again: bool) -> Estimate:
            return estimate(
                layout,
                workload,
                cluster,
                checkpointing=again,
                select_and_drop=select_and_drop,
                overlap_spread=overlap_spread,
            )

        if checkpointing is not None:
            return at(checkpointing)
        without = at(False)
        return without if without.fits else at(True)

    candidates = admissible(cluster.levels) if strategies is None else strategies
    estimates = [cost(strategy.on(cluster.levels)) for strategy in candidates]
    eligible = [found for found in estimates if found.fits and (allow_quantised or found.layout.strategy.precision.exact)]
    choice = _best(eligible, objective)
    key = _time(objective)
    ordered = sorted(estimates, key=lambda found: (not found.fits, key(found), found.memory.device))
    return Plan(tuple(ordered), choice)


def refusal(plan: Plan, cluster: Cluster) -> UserError:
    """What to say where nothing fits: by how much the smallest strategy misses."""
    least = min(plan.estimates, key=lambda found: (found.memory.device, found.memory.host))
    return UserError(
        f"No strategy fits. The one that needs least, {least.name}, takes {format_bytes(least.memory.device)} of the "
        f"{format_bytes(cluster.device_memory_bytes)} on a device and {format_bytes(least.memory.host)} of the "
        f"{format_bytes(cluster.host_memory_bytes)} on a node. Use more nodes, a smaller --micro-batch or --seq-len."
    )


def _best(estimates: Sequence[Estimate], objective: Objective) -> Estimate | None:
    if not estimates:
        return None
    key = _time(objective)
    fastest = min(map(key, estimates))
    if objective == "communication":
        return min(estimates, key=lambda found: (key(found), found.memory.device))
    near = [found for found in estimates if key(found) <= fastest * (1 + SAME)]
    return min(near, key=lambda found: (found.communication_seconds, found.memory.device, found.memory.host))


def _time(objective: Objective) -> Callable[[Estimate], float]:
    return (lambda found: found.step_seconds) if objective == "step" else (lambda found: found.communication_seconds)


def _named(p: Scope, g: Scope, os: Scope, cache: str, ring: str) -> Strategy | None:
    """The strategy with this cache, under a name that ``--strategy`` understands; None where the cache makes none."""
    text = f"{p}/{g}/{os}"
    try:
        plain = Strategy(text, p, g, os, ring=ring)  # type: ignore[arg-type]
        if cache == "device":
            return plain
        tier: Tier = "host" if cache == "host" else "adaptive"
        return replace(plain, name=f"{text}+{tier}", cache=tier) if (p.numbers or (0, 2))[1] == 1 and p != os else None
    except UserError:
        return None


def _fits(text: str, levels: Levels) -> bool:
    try:
        Scope(text).on(levels)
    except UserError:
        return False
    return True


def _on(strategy: Strategy, levels: Levels) -> bool:
    """Whether a preset can be had on these levels: a pair needs a level of its own, 8x4 needs four nodes."""
    try:
        strategy.on(levels)
    except UserError:
        return False
    return True


def _holds(outer: Scope, inner: Scope, levels: Levels) -> bool:
    return _mesh(outer, levels).holds(_mesh(inner, levels))


def _mesh(scope: Scope, levels: Levels) -> Mesh:
    return scope.on(levels)
