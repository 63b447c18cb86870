"""``--strategy``, ``--cluster`` and ``--levels``: checking what they name, and choosing a strategy for ``auto``."""

import contextlib
from pathlib import Path

from transformers import PreTrainedConfig

from cli.options.settings import Settings
from common.errors import UserError
from fcdp.planner import Cluster, Estimate, Workload, admissible, cluster_names, load_cluster, plan
from fcdp.planner.cluster import MeasuredRates
from fcdp.planner.profiling import profile_cluster
from fcdp.planner.search import refusal
from fcdp.strategy.mesh import Levels
from fcdp.strategy.strategy import AUTO, Strategy, parse_strategy
from fcdp.strategy.topology import Topology, linked_gpus

DEFAULT = "fcdp"  # Strategy of a single rank, and of runs that began before clusters were measured by default
# Name of the file in the output directory that describes the cluster as it was measured
PROFILE = "cluster.json"


def cluster_of(name: str | None, levels: str | None, nodes: int | None, gpus_per_node: int | None) -> Cluster:
    """Return the cluster called ``name``, resized to what the other options say; None: as it is."""
    if name is None:
        raise UserError(
            f"Name the hardware: --cluster PRESET, one of {', '.join(cluster_names())}, or a profile's file, which "
            "finetune profile --nodes N writes."
        )
    cluster = load_cluster(name)
    if levels is not None:
        return cluster.resized(levels_of(levels, nodes, gpus_per_node))
    *inner, last, there = cluster.levels.sizes
    ranks = cluster.levels.ranks_per_node if gpus_per_node is None else gpus_per_node
    faster = cluster.levels.ranks_per_node // last
    if ranks % faster:
        raise UserError(
            f"{name} has {faster} ranks at its fastest level, which {ranks} per node do not fill."
        )
    return cluster.resized(Levels((*inner, ranks // faster, nodes or there)))


def levels_of(text: str, nodes: int | None, gpus_per_node: int | None) -> Levels:
    """Parse ``--levels``, which the other two options must not contradict."""
    levels = Levels.parse(text)
    for option, given, there in (
        ("--nodes", nodes, levels.nodes),
        ("--gpus-per-node", gpus_per_node, levels.ranks_per_node),
    ):
        if given not in (None, there):
            raise UserError(
                f"--levels {levels} has {there} where {option} says {given}. Leave one of them out."
            )
    return levels


def check_strategy(settings: Settings, ranks_per_node: int) -> None:
    """Refuse a strategy that cannot be trained with, as far as this node can tell, before it waits for others."""
    assert settings.nodes is not None
    levels = Levels((ranks_per_node, settings.nodes))
    if settings.levels is not None:
        levels = levels_of(settings.levels, settings.nodes, ranks_per_node)
    elif (group := linked_gpus(ranks_per_node)) > 1:
        levels = Levels((group, ranks_per_node // group, settings.nodes))
    if settings.strategy in (None, AUTO) and settings.cluster not in (None, AUTO):
        cluster_of(settings.cluster, settings.levels, settings.nodes, ranks_per_node)
    elif settings.strategy != AUTO:
        strategy = parse_strategy(settings.strategy or DEFAULT)
        if "switch" not in (strategy.p.text, strategy.g.text, strategy.os.text):  # known when nodes have met
            strategy.on(levels)


def has_profile(profile: Path, levels: Levels) -> bool:
    try:
        return profile.exists() and load_cluster(str(profile)).levels == levels
    except UserError:  # of another version: it is measured again if requested
        return False


def choose_strategy(cluster: Cluster, workload: Workload, levels: Levels) -> Estimate:
    """Return the fastest strategy that fits ranks of these levels, by the planner, with what it is expected to cost."""
    possible: list[Strategy] = []
    for strategy in admissible(cluster.levels):
        with contextlib.suppress(UserError):
            strategy.on(levels)
            possible.append(strategy)
    # Blocks are recomputed in the backward pass, whether there is room or not: that is what the trainer does.
    plans = plan(workload, cluster, strategies=possible, checkpointing=True)
    if plans.choice is None:
        raise refusal(plans, cluster)
    return plans.choice


def measure_cluster(
    config: PreTrainedConfig, profile: Path, topology: Topology, rows: int, seq_len: int, dtype: str
) -> MeasuredRates:
    """Measure the cluster, and have rank 0 write its ``profile``. Collective."""

    def say(what: str) -> None:
        if topology.rank == 0:
            print(f"measuring {what}", flush=True)

    return profile_cluster(topology, config, profile, rows=rows, seq_len=seq_len, dtype=dtype, say=say)
