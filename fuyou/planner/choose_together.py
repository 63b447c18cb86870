"""What several ranks leave to the planner: the first one chooses for all, by its profile and the links between them.

All ranks must have the same task list, and they are alike: so one choice serves all.
"""

import contextlib
import time

import torch
import torch.distributed as dist

from common.errors import UserError
from fuyou.planner import Choice, PlannerContext, RankLinks, choose
from fuyou.ranks.agreement import Agreement
from fuyou.ranks.collectives import gather
from fuyou.ranks.topology import ClusterTopology
from fuyou.runtime.devices import Device
from fuyou.runtime.emulated import EmulatedDevice

_SMALL_BYTES, _SMALL_ROUNDS = 64, 8
_FIRST_BYTES, _MOST_BYTES = 1 << 20, 64 << 20
"""Sent by each rank: first to see how long it takes, then as much as a look of ``_SECONDS`` needs."""
_SECONDS = 0.25


def choose_together(prospect: PlannerContext, topology: ClusterTopology, agreement: Agreement) -> Choice | None:
    """What :func:`fuyou.planner.choose` says on rank 0, on every rank. Collective.

    Args:
        prospect: a rank's part of what is going to run, with its own drives and the limits that all ranks have.
    """
    first = prospect.training.shape.share.rank == 0
    if not agreement.all_gather_object(first and _is_profiled(prospect))[0]:
        return None
    links = measure_links(topology, prospect.device, agreement)
    choice = choose(prospect, links) if first else None
    told = agreement.all_gather_object(choice.to_dict() if choice is not None else None)[0]
    return None if told is None else Choice.from_dict(told)


def _is_profiled(prospect: PlannerContext) -> bool:
    with contextlib.suppress(UserError):  # the engine will say what does not fit
        return prospect.profile is not None
    return False


def measure_links(topology: ClusterTopology, device: Device, agreement: Agreement) -> RankLinks:
    """The slowest link of each level, and what an exchange takes beside its bytes. Collective; takes a second at most
    on a network of 1 Gbit/s.

    All groups of a level send at once, as they do in a step, so ranks that share a wire are measured sharing it. An
    emulated accelerator has rates of its own; only its meetings are measured.
    """
    groups = topology.gather_groups
    emulated = device.spec if isinstance(device, EmulatedDevice) else None
    rates, messages = [], [0.0]
    for group in (groups.intra_node, groups.inter_node):
        rate = float("inf")
        if group is not None:
            messages.append(_seconds(group, device, _SMALL_BYTES, _SMALL_ROUNDS, agreement))
            if emulated is None:
                first = _seconds(group, device, _FIRST_BYTES, 1, agreement)
                nbytes = min(max(int(_FIRST_BYTES * _SECONDS / first), _FIRST_BYTES), _MOST_BYTES)
                rate = nbytes / max(_seconds(group, device, nbytes, 1, agreement) - messages[-1], 1e-9)
        rates.append(rate)
    if emulated is not None:
        limits = (emulated.intra_node_bytes_per_second, emulated.inter_node_bytes_per_second)
        rates = [rate or float("inf") for rate in limits]
    intra_node, inter_node = rates
    return RankLinks(intra_node, inter_node, max(messages))


def _seconds(group: dist.ProcessGroup, device: Device, nbytes: int, rounds: int, agreement: Agreement) -> float:
    """That the slowest rank takes for an exchange in which each sends ``nbytes``, after one that does not count."""
    cells = torch.zeros((group.size(), nbytes // (group.size() - 1)), dtype=torch.uint8, device=device.torch_device)
    began = 0.0
    for turn in range(1 + rounds):
        if turn == 1:
            began = time.monotonic()
        gather(cells, group)
        device.synchronize()
    return float(max(agreement.all_gather_object((time.monotonic() - began) / rounds)))
