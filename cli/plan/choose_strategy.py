"""``--strategy``: what was named, checked before anybody waits for other nodes; ``auto``: what the planner chooses."""

import contextlib

from cli.options.settings import Settings
from cli.plan.cluster import cluster_of, levels_of
from common.errors import UserError
from fcdp.planner import Estimate, Workload, admissible, plan
from fcdp.planner.search import refusal
from fcdp.strategy.links import linked_gpus
from fcdp.strategy.mesh import Levels
from fcdp.strategy.names import AUTO, parse_strategy
from fcdp.strategy.strategy import Strategy

DEFAULT = "fcdp"
"""What is trained with where nothing is said."""


def check_strategy(settings: Settings, ranks_per_node: int) -> None:
    """Refuse what cannot be trained with, as far as this node can tell.

    Raises:
        UserError: no such strategy, levels or cluster, or they do not go together.
    """
    assert settings.nodes is not None
    levels = Levels((ranks_per_node, settings.nodes))
    if settings.levels is not None:
        levels = levels_of(settings.levels, settings.nodes, ranks_per_node)
    elif (group := linked_gpus(ranks_per_node)) > 1:
        levels = Levels((group, ranks_per_node // group, settings.nodes))
    if settings.strategy == AUTO:
        cluster_of(settings.cluster, settings.levels, settings.nodes, ranks_per_node)
    else:
        parse_strategy(settings.strategy or DEFAULT).on(levels)


def choose_strategy(settings: Settings, workload: Workload, levels: Levels) -> Estimate:
    """The fastest strategy that fits, by the planner, with what it is expected to cost.

    Args:
        levels: of the ranks that are to train. The cluster may be known in more detail.

    Raises:
        UserError: the cluster is not known in this size.
        FinetuneError: nothing fits.
    """
    cluster = cluster_of(settings.cluster, settings.levels, levels.nodes, levels.ranks_per_node)
    possible: list[Strategy] = []
    for strategy in admissible(cluster.levels):
        with contextlib.suppress(UserError):
            strategy.on(levels)
            possible.append(strategy)
    # Blocks are recomputed in the backward pass, whether there is room or not: that is what the trainer does.
    found = plan(workload, cluster, strategies=possible, allow_quantised=settings.quantise, checkpointing=True)
    if found.choice is None:
        raise refusal(found, cluster)
    return found.choice
