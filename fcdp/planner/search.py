"""The search among all admissible strategies for the fastest that fits (AMSP section V)."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from common.errors import FinetuneError, UserError
from common.units import format_bytes
from fcdp.planner.cluster import Cluster
from fcdp.planner.cost import Engine, Estimate, estimate
from fcdp.planner.workload import Workload
from fcdp.strategy.mesh import Levels, Scope
from fcdp.strategy.names import PARO, PRESETS, parse_strategy
from fcdp.strategy.strategy import Strategy, StrategyMeshes, Tier

Objective = Literal["step", "communication"]

SAME = 0.01  # part by which times may differ and still count as equal, as far as a model of them can tell


@dataclass(frozen=True)
class StrategyPlan:
    """All strategies with their costs, the best first."""

    estimates: tuple[Estimate, ...]
    choice: Estimate | None  # the best strategy that fits and changes no arithmetic. None: nothing fits.

    def as_dict(self) -> dict[str, Any]:
        """Return the plan for JSON."""
        chosen = None if self.choice is None else self.choice.as_dict()
        return {"choice": chosen, "strategies": [found.as_dict() for found in self.estimates]}


def scopes_of(levels: Levels) -> list[Scope]:
    """Return the scopes that pass AMSP's filters (V-B, equations 5 to 7), from none to all: they divide ranks and nodes
    without rest, and take all ranks of a node before a second node. Letters where there is one."""
    node = levels.ranks_per_node
    texts = [f"{ranks}x1" for ranks in range(1, node + 1)] + [f"{node}x{nodes}" for nodes in range(2, levels.nodes + 1)]
    letters = {Scope(letter).on(levels): Scope(letter) for letter in "GIN"}  # N last: on one rank all are the same
    found = []
    for text in texts:
        with contextlib.suppress(UserError):
            scope = Scope.parse(text)
            found.append(letters.get(scope.on(levels), scope))
    return found


def admissible(levels: Levels) -> list[Strategy]:
    """Return every strategy that the papers' rules leave, each once, under a name that ``--strategy`` understands.

    The presets; AMSP's meshes and PaRO's four that AMSP's rule excludes, with P's shards in device or host memory; and
    a secondary partition inside the node where P is sharded across nodes."""
    found: dict[tuple[object, ...], Strategy] = {}

    def add(strategy: Strategy) -> None:
        # On these levels, names may mean the same: 8x1 is I. The first one stays.
        layout = strategy.on(levels)
        point = (layout.p, layout.g, layout.os, layout.secondary, layout.cache, strategy.precision, strategy.ring)
        found.setdefault(point, strategy)

    for preset in PRESETS.values():
        with contextlib.suppress(UserError):  # a pair needs a level, 8x4 four nodes
            add(preset)
    scopes = scopes_of(levels)
    mesh = {scope: scope.on(levels) for scope in (*scopes, *map(Scope, "NIG"))}
    triples = [
        (p, g, os)
        for p, g, os in product(scopes, repeat=3)
        if mesh[os].holds(mesh[g]) and mesh[g].holds(mesh[p])  # equations 3 and 4
    ]
    triples += [(Scope(letters[0]), Scope(letters[1]), Scope(letters[2])) for letters in PARO]
    for p, g, os in triples:
        add(_strategy(p, g, os))
        if mesh[p].nodes == 1 and 1 < mesh[p].shards < mesh[os].shards:
            add(_strategy(p, g, os, cache="host"))
        if mesh[p].nodes > 1 and levels.ranks_per_node > 1:
            add(_strategy(p, g, os, secondary=True, cache="device"))
            add(_strategy(p, g, os, secondary=True, cache="host"))
    return list(found.values())


def _strategy(p: Scope, g: Scope, os: Scope, *, secondary: bool = False, cache: Tier | None = None) -> Strategy:
    """Return the strategy with these scopes, as :func:`parse_strategy` reads its name."""
    return parse_strategy(
        "/".join(map(str, (p, g, os))) + (f"+{cache}" if cache else "") + ("+second" if secondary else "")
    )


def plan(
    workload: Workload,
    cluster: Cluster,
    *,
    strategies: Sequence[Strategy] | None = None,
    objective: Objective = "step",
    allow_quantised: bool = False,
    checkpointing: bool | None = None,
    engine: Engine | None = None,
) -> StrategyPlan:
    """Estimate every strategy and choose one: exhaustively, since the rules leave few (AMSP V-B).

    Args:
        strategies: those to choose from. None: all that are admissible.
        objective: ``step``: the time of a step, and among those within :data:`SAME` of the fastest the least
            communication, then memory. ``communication``: AMSP's equation 1, without overlap, then memory.
        allow_quantised: whether a strategy that quantises may be chosen. All are listed either way.
        checkpointing: whether activations are checkpointed; None: only where a strategy does not fit without.
        engine: the engine that trains; None: ours.
    """

    def cost(layout: StrategyMeshes) -> Estimate:
        def at(again: bool) -> Estimate:
            return estimate(layout, workload, cluster, checkpointing=again, engine=engine)

        if checkpointing is not None:
            return at(checkpointing)
        without = at(False)
        return without if without.fits else at(True)

    candidates = admissible(cluster.levels) if strategies is None else strategies
    estimates = [cost(strategy.on(cluster.levels)) for strategy in candidates]
    eligible = [
        found for found in estimates if found.fits and (allow_quantised or found.layout.strategy.precision.exact)
    ]
    choice = _best(eligible, objective)
    key = _time(objective)
    ordered = sorted(estimates, key=lambda found: (not found.fits, key(found), found.memory.device))
    return StrategyPlan(tuple(ordered), choice)


def refusal(plan: StrategyPlan, cluster: Cluster) -> FinetuneError:
    """Return an error that says that nothing fits, and what the smallest strategy needs."""
    least = min(plan.estimates, key=lambda found: (found.memory.device, found.memory.host))
    return FinetuneError(
        f"No strategy fits. The one that needs least, {least.name}, takes {format_bytes(least.memory.device)} of the "
        f"{format_bytes(cluster.device_memory_bytes)} on a device and {format_bytes(least.memory.host)} of the "
        f"{format_bytes(cluster.host_memory_bytes)} on a node. Use more nodes, a smaller --micro-batch or --seq-len. "
        "(To train all the same, name a --strategy.)"
    )


def _best(estimates: Sequence[Estimate], objective: Objective) -> Estimate | None:
    if not estimates:
        return None
    key = _time(objective)
    fastest = min(map(key, estimates))
    near = [found for found in estimates if key(found) <= fastest * (1 + SAME)]
    if objective == "communication":
        return min(near, key=lambda found: (found.memory.device, found.memory.host))
    return min(near, key=lambda found: (found.communication_seconds, found.memory.device, found.memory.host))


def _time(objective: Objective) -> Callable[[Estimate], float]:
    return (lambda found: found.step_seconds) if objective == "step" else (lambda found: found.communication_seconds)
