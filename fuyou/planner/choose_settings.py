"""Choose the settings that a run leaves open, at its start."""

import contextlib
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from common.errors import UserError
from fuyou.model.recompute.policy import ActivationPolicy
from fuyou.planner.evaluate import Evaluator
from fuyou.planner.machine import RankLinks, machine_of_one_rank, profiled_machine
from fuyou.planner.run_plan import RunPlan
from fuyou.planner.search import choose
from fuyou.runtime.device import Device
from fuyou.runtime.ranks import Agreement, ClusterTopology, gather

# For the fixed cost of an exchange
_SMALL_BYTES = 64
_SMALL_ROUNDS = 8
_LARGE_BYTES = 16 << 20  # For the rate: 0.13 s at 1 Gbit/s


def choose_settings(
    plan: RunPlan, agreement: Agreement, topology: ClusterTopology | None = None
) -> dict[str, Any] | None:
    """Return the engine's options for the fastest run on this machine, or None without a profile of machine and model.

    Rank 0 chooses for all ranks, which need the same task list. Collective. No choice changes a number: the micro-batch
    is that of the memory plan. The simulations take 0.1 s (a small model) to 3 s (160 layers).

    Args:
        plan: this rank's part of the run, with its drives and the limits that all ranks have.
        topology: links to the other ranks, which are measured; None if there are no other ranks.
    """
    is_rank0 = plan.job.layout.share.rank == 0
    is_profiled = False
    with contextlib.suppress(UserError):  # the engine will say what does not fit
        is_profiled = is_rank0 and plan.profile is not None
    if not agreement.all_gather_object(is_profiled)[0]:
        return None
    links = None if topology is None else measure_links(topology, plan.device, agreement)
    chosen = agreement.all_gather_object(_best_settings(plan, links) if is_rank0 else None)[0]
    if chosen is None:
        return None
    operators, layers = chosen["saved_activations"]
    policy = ActivationPolicy(tuple((name, ordinal) for name, ordinal in operators), layers)
    return {**chosen, "saved_activations": policy}


def _best_settings(plan: RunPlan, links: RankLinks | None) -> dict[str, Any] | None:
    """Return the options as JSON, from a profile that there is; None if nothing fits."""
    job, (host, device) = plan.fitted, plan.limits
    assert plan.profile is not None
    rows = plan.memory.batch.micro_rows
    ranks = job.layout.share.ranks_per_node
    shared = plan.device.shares_host_memory
    machine = profiled_machine(plan.profile, shared, device, host * ranks, plan.directories, None)
    if links is not None:
        machine = machine_of_one_rank(machine, ranks, links)
    try:
        best = choose(Evaluator(replace(job, micro_batch=rows), machine)).candidate
    except UserError:
        return None  # the engine will say what does not fit
    return {
        "micro_batch": rows,
        "deferred_fraction": best.deferred_fraction,
        "saved_activations": [best.activation_policy.operators, best.activation_policy.layers],
        "clip_by": best.clip_by.value,
    }


def measure_links(topology: ClusterTopology, device: Device, agreement: Agreement) -> RankLinks:
    """Measure the slowest link inside and between nodes, and the fixed cost of an exchange. Collective.

    Takes a second at most on a network of 1 Gbit/s. All groups of a level send at once, as in a step, so that ranks
    that share a wire are measured sharing it.
    """
    groups = topology.gather_groups
    rates = []
    messages = [0.0]
    for group in (groups.intra_node, groups.inter_node):
        rate = float("inf")
        if group is not None:
            messages.append(_exchange_seconds(group, device, _SMALL_BYTES, _SMALL_ROUNDS, agreement))
            seconds = _exchange_seconds(group, device, _LARGE_BYTES, 1, agreement)
            rate = _LARGE_BYTES / max(seconds - messages[-1], 1e-9)
        rates.append(rate)
    intra_node, inter_node = rates
    return RankLinks(intra_node, inter_node, max(messages))


def _exchange_seconds(
    group: dist.ProcessGroup, device: Device, nbytes: int, rounds: int, agreement: Agreement
) -> float:
    """Return the slowest rank's seconds for an exchange of ``nbytes`` per rank, after one warm-up."""
    cells = torch.zeros(
        (group.size(), nbytes // (group.size() - 1)), dtype=torch.uint8, device=device.torch_device
    )
    start = 0.0
    for turn in range(1 + rounds):
        if turn == 1:
            start = time.monotonic()
        gather(cells, group)
        device.synchronize()
    return float(max(agreement.all_gather_object((time.monotonic() - start) / rounds)))
