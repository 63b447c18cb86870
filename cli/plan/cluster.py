"""Plan for a cluster: every sharding strategy that fits, its costs, and the fastest."""

import json
from dataclasses import replace

import torch

from cli.job.machine import sequence_length
from cli.job.model import trained_share
from cli.job.strategy import cluster_of
from cli.options.option import naming
from cli.options.settings import Settings
from common.errors import UserError
from common.models.adapters.adapted_model import AdaptedModel
from common.models.presets import load_config
from common.units import counted, format_bytes, format_count, format_seconds
from fcdp.planner import Cluster, Estimate, StrategyPlan, Workload, bytes_per_node, plan
from fcdp.planner.cluster import group_of, groups_across_leaves, node_order
from fcdp.planner.search import refusal
from fcdp.strategy.mesh import Levels
from fcdp.strategy.strategy import AUTO, PRESETS, parse_strategy
from fuyou.planner.training_job import adapted_as


def plan_cluster(settings: Settings, batch_size: int | None) -> int:
    """Print the plan and return the exit status; ``batch_size`` is of all ranks, None for one micro-batch per rank."""
    cluster = cluster_of(settings.cluster, settings.levels, settings.nodes, settings.gpus_per_node)
    workload = _workload(settings, batch_size, cluster)
    chosen = None if settings.strategy in (None, AUTO) else [parse_strategy(settings.strategy)]
    result = plan(workload, cluster, strategies=chosen, allow_quantized=chosen is not None)
    alone = _on_one_node(result, workload, cluster)
    if settings.json:
        more = {
            "node_order": _node_order(result, cluster),
            "one_node": None if alone is None else alone.as_dict(),
        }
        print(json.dumps({**result.as_dict(), **more}, indent=1))
    if result.choice is None:
        raise refusal(result, cluster)
    if not settings.json:
        print(render(result, workload, cluster))
    if not settings.json and alone is not None:
        batch = workload.micro_batch * workload.micro_batches * cluster.levels.world_size
        size = "--nodes 1" if settings.levels is None else f"--levels {alone.layout.levels}"
        print(
            f"one node is faster: {alone.name}, {format_seconds(alone.step_seconds)} per step instead of "
            f"{format_seconds(result.choice.step_seconds)} ({size} --batch-size {batch})"
        )
    return 0


def _on_one_node(result: StrategyPlan, workload: Workload, cluster: Cluster) -> Estimate | None:
    """Return the fastest strategy for the same batch on one node, if several nodes take longer."""
    *inner, nodes = cluster.levels.sizes
    if nodes == 1 or result.choice is None:
        return None
    try:
        one_node = cluster.resized(Levels((*inner, 1)))
    except UserError:  # a measured cluster, without times for other numbers of nodes
        return None
    choice = plan(replace(workload, micro_batches=workload.micro_batches * nodes), one_node).choice
    return choice if choice is not None and choice.step_seconds < result.choice.step_seconds else None


def _workload(settings: Settings, batch_size: int | None, cluster: Cluster) -> Workload:
    with naming("--model"):
        config, _ = load_config(settings.model)
    micro_batch = settings.micro_batch or 1
    at_once = micro_batch * cluster.levels.world_size
    batch = batch_size or at_once
    if batch % at_once:
        raise UserError(
            f"--batch-size {batch} is not a multiple of {at_once}: {micro_batch} at once on each of "
            f"{cluster.levels.world_size} ranks. Take {max(1, round(batch / at_once)) * at_once}."
        )
    seq_len = sequence_length(settings.seq_len, config, only_planned=True)
    adapted = AdaptedModel(config, torch.float32, **adapted_as(settings.engine), draw=False)
    return Workload.of_model(
        config,
        seq_len=seq_len,
        micro_batch=micro_batch,
        micro_batches=batch // at_once,
        trainable_ratio=trained_share(adapted),
        dtype_bytes=4 if settings.dtype == "fp32" else 2,
        cache_threshold=settings.device_cache_threshold,
        router_loss=settings.router_loss,
    )


def _node_order(result: StrategyPlan, cluster: Cluster) -> list[int] | None:
    if result.choice is None or cluster.leaf_of_node is None:
        return None
    return node_order(cluster.leaf_of_node, group_of(result.choice.layout))


_HEADINGS = (
    "strategy", "P", "G", "OS", "cache", "device", "host", "gather", "reduce", "spread", "inside", "MFU", "step",
)  # fmt: skip
_FASTEST = 20  # Strategies that the table has, besides those with a name


def render(result: StrategyPlan, workload: Workload, cluster: Cluster) -> str:
    """Return the plan as a table of the fastest strategies and those with a name, and the choice."""
    levels = cluster.levels
    choice = result.choice
    fitting = [estimate for estimate in result.estimates if estimate.fits]
    shown = [estimate for rank, estimate in enumerate(fitting) if rank < _FASTEST or estimate.name in PRESETS]
    lines = [
        f"{cluster.title}: {counted(levels.nodes, 'node')} with {counted(levels.ranks_per_node, 'device')}, "
        f"{format_bytes(cluster.device_memory_bytes)} each",
        f"{format_count(workload.parameters)} parameters, {format_count(workload.trainable)} of them trainable; "
        f"{counted(workload.micro_batches, 'micro-batch', 'micro-batches')} of {workload.micro_batch} x "
        f"{workload.seq_len} tokens on each device",
        "",
        f"{len(fitting)} of {counted(len(result.estimates), 'strategy', 'strategies')} fit. gather, reduce, spread: "
        "bytes that a node sends to others per step; inside: to itself.",
        "c: blocks are computed again in the backward pass. q: sent in fewer bits, so chosen only on request.",
        "",
    ]
    rows = [_HEADINGS, *(_row(estimate) for estimate in shown)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines += [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    if len(shown) < len(fitting):
        lines.append(f"and {len(fitting) - len(shown)} more without a name, which --json lists")
    if choice is not None:
        computing = format_seconds(choice.compute_seconds)
        lines += [
            "",
            f"choice: {choice.name}, {format_seconds(choice.step_seconds)} per step ({computing} of computing)",
        ]
        plain = next((estimate for estimate in fitting if estimate.name == "zero3"), choice)
        if plain is not choice:
            gain = plain.step_seconds / choice.step_seconds
            lines.append(f"  {gain:.2f} times as fast as zero3, plain FSDP2")
    order = _node_order(result, cluster)
    if order is not None and choice is not None and cluster.leaf_of_node is not None:
        group = group_of(choice.layout)
        groups = len(order) // group
        inside = groups - groups_across_leaves(order, cluster.leaf_of_node, group)
        lines.append(
            f"  number nodes in this order, so that {inside} of {groups} groups of {group} stay under one leaf "
            f"switch: {' '.join(map(str, order))}"
        )
    return "\n".join(lines)


def _row(estimate: Estimate) -> tuple[str, ...]:
    layout = estimate.layout
    by_purpose = {"gather": 0.0, "reduce": 0.0, "spread": 0.0}
    for collective in estimate.collectives:
        by_purpose[collective.purpose.split()[0]] += bytes_per_node([collective], layout)[0]
    marks = "c" * estimate.checkpointing + "q" * (not layout.strategy.precision.exact)
    return (
        estimate.name,
        str(layout.p),
        str(layout.g),
        str(layout.os),
        layout.cache if layout.cache != "none" else "-",
        format_bytes(estimate.memory.device),
        format_bytes(estimate.memory.host) if estimate.memory.host else "-",
        *(format_bytes(nbytes) if nbytes else "-" for nbytes in by_purpose.values()),
        format_bytes(estimate.intra_node_bytes) if estimate.intra_node_bytes else "-",
        "-" if estimate.mfu is None else f"{estimate.mfu:.0%}",
        f"{format_seconds(estimate.step_seconds)} {marks}".rstrip(),
    )
