"""The search among all admissible strategies for the fastest that fits (AMSP section V)."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from common.errors import FinetuneError, UserError
from common.units import format_bytes
from fcdp.planner.cluster import Cluster
from fcdp.planner.cost import Engine, Estimate, estimate
from fcdp.planner.workload import Workload
from fcdp.strategy.mesh import Levels, Scope
from fcdp.strategy.strategy import PARO, PRESETS, Strategy, parse_strategy

Objective = Literal["step", "communication"]

SAME = 0.01  # part by which times may differ and still count as equal, as far as a model of them can tell


@dataclass(frozen=True)
class StrategyPlan:
    """All strategies with their costs, the best first."""

    estimates: tuple[Estimate, ...]
    choice: Estimate | None  # the best strategy that fits and changes no arithmetic. None: nothing fits.

    def as_dict(self) -> dict[str, Any]:
        chosen = None if self.choice is None else self.choice.as_dict()
        return {"choice": chosen, "strategies": [planned.as_dict() for planned in self.estimates]}


def scopes_of(levels: Levels) -> list[Scope]:
    """Return the scopes that pass AMSP's filters (V-B, equations 5 to 7), from none to all: they divide ranks and nodes
    without rest, and take all ranks of a node before a second node. Letters where there is one."""
    node = levels.ranks_per_node
    texts = [f"{ranks}x1" for ranks in range(1, node + 1)] + [
        f"{node}x{nodes}" for nodes in range(2, levels.nodes + 1)
    ]
    # N last: on one rank all are the same
    letters = {Scope(letter).on(levels): Scope(letter) for letter in "GIN"}
    scopes = []
    for text in texts:
        with contextlib.suppress(UserError):
            scope = Scope.parse(text)
            scopes.append(letters.get(scope.on(levels), scope))
    return scopes


def admissible(levels: Levels) -> list[Strategy]:
    """Return every strategy that the papers' rules leave, each once, under a name that ``--strategy`` understands.

    The presets; AMSP's meshes and PaRO's four that AMSP's rule excludes, with P's shards in device or host memory; and
    a secondary partition inside the node where P is sharded across nodes."""
    points: dict[tuple[object, ...], Strategy] = {}

    def add(strategy: Strategy) -> None:
        # On these levels, names may mean the same: 8x1 is I. The first one stays.
        layout = strategy.on(levels)
        point = (
            layout.p,
            layout.g,
            layout.os,
            layout.secondary,
            layout.cache,
            strategy.precision,
            strategy.ring,
        )
        points.setdefault(point, strategy)

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
        text = "/".join(map(str, (p, g, os)))
        tiers = [""]
        if mesh[p].nodes == 1 and 1 < mesh[p].shards < mesh[os].shards:
            tiers.append("+host")
        if mesh[p].nodes > 1 and levels.ranks_per_node > 1:
            tiers += ["+device+second", "+host+second"]
        for tier in tiers:
            add(parse_strategy(text + tier))
    return list(points.values())


def plan(
    workload: Workload,
    cluster: Cluster,
    *,
    strategies: Sequence[Strategy] | None = None,
    objective: Objective = "step",
    allow_quantized: bool = False,
    checkpointing: bool | None = None,
    engine: Engine | None = None,
) -> StrategyPlan:
    """Estimate every strategy and choose one: exhaustively, since the rules leave few (AMSP V-B).

    Args:
        strategies: those to choose from. None: all that are admissible.
        objective: ``step``: the time of a step, and among those within :data:`SAME` of the fastest the least
            communication, then memory. ``communication``: AMSP's equation 1, without overlap, then memory.
        allow_quantized: whether a strategy that quantizes may be chosen. All are listed either way.
        checkpointing: whether activations are checkpointed; None: only where a strategy does not fit without.
        engine: the engine that trains; None: ours.
    """

    def cost(strategy: Strategy) -> Estimate:
        layout = strategy.on(cluster.levels)
        planned = estimate(layout, workload, cluster, checkpointing=bool(checkpointing), engine=engine)
        if checkpointing is None and not planned.fits:
            return estimate(layout, workload, cluster, checkpointing=True, engine=engine)
        return planned

    def seconds(planned: Estimate) -> float:
        return planned.step_seconds if objective == "step" else planned.communication_seconds

    estimates = [cost(each) for each in (admissible(cluster.levels) if strategies is None else strategies)]
    eligible = [
        each for each in estimates if each.fits and (allow_quantized or each.layout.strategy.precision.exact)
    ]
    choice = None
    if eligible:
        fastest = min(map(seconds, eligible))
        near = [each for each in eligible if seconds(each) <= fastest * (1 + SAME)]
        least = (lambda each: each.communication_seconds) if objective == "step" else (lambda each: 0.0)
        choice = min(near, key=lambda each: (least(each), each.memory.device, each.memory.host))
    ordered = sorted(estimates, key=lambda each: (not each.fits, seconds(each), each.memory.device))
    return StrategyPlan(tuple(ordered), choice)


def refusal(plan: StrategyPlan, cluster: Cluster) -> FinetuneError:
    """Return an error that says that nothing fits, and what the smallest strategy needs."""
    least = min(plan.estimates, key=lambda planned: (planned.memory.device, planned.memory.host))
    return FinetuneError(
        f"No strategy fits. The one that needs least, {least.name}, takes {format_bytes(least.memory.device)} of the "
        f"{format_bytes(cluster.device_memory_bytes)} on a device and {format_bytes(least.memory.host)} of the "
        f"{format_bytes(cluster.host_memory_bytes)} on a node. Use a smaller --micro-batch or --seq-len, "
        + (
            "or another --strategy."
            if len(plan.estimates) == 1
            else "more nodes, or name a --strategy to try it."
        )
    )
