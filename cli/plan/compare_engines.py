"""Out of core or in memory? What FSDP2 with FCDP would take for the same step on the same machines without SSDs."""

import math
from dataclasses import dataclass
from typing import Any

from common.units import format_bytes, format_seconds
from fcdp.planner import Cluster, Estimate, Workload, plan
from fcdp.planner.rates import AlphaBeta, Link
from fcdp.strategy.mesh import Levels
from fuyou.planner import Machine, RunPlan, TrainingJob

LATENCY_SECONDS = 10e-6
"""Latency of a step of a ring, as the presets of clusters have it on Ethernet and inside nodes."""


@dataclass(frozen=True)
class InMemory:
    """The best way to train in memory, as far as presets can tell.

    The optimizer step, which runs on the device, and what the network loses between messages are not counted, so that
    it does not look worse than it is.
    """

    best: Estimate | None
    """Fastest strategy; None: none fits, at any micro-batch."""
    least_device_bytes: float
    """Device memory of the strategy that needs least."""
    device_bytes: int
    """Device memory that there is."""

    def verdict(self, result: RunPlan) -> str:
        """Return which of the two is faster, in words."""
        if self.best is None:
            return (
                f"does not fit: the strategy that needs least takes {format_bytes(int(self.least_device_bytes))} of "
                f"{format_bytes(self.device_bytes)} on each device"
            )
        seconds = self.best.step_seconds
        text = f"{self.best.name} takes {format_seconds(seconds)} per step"
        if not result.fits:
            return f"{text}, and fits: leave --ssd out"
        factor = result.step_seconds / seconds
        if factor > 1:
            return f"{text}, {factor:.2g} times as fast: leave --ssd out"
        return f"{text}: out of core is {1 / factor:.2g} times as fast"

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``--json``."""
        if self.best is None:
            return {"fits": False, "least_device_bytes": round(self.least_device_bytes)}
        return {"fits": True, "strategy": self.best.name, "step_seconds": self.best.step_seconds}


def in_memory(job: TrainingJob, machine: Machine, network_bytes_per_second: float) -> InMemory:
    """Cost every strategy at every micro-batch that divides the batch, and keep the best.

    Args:
        job: training of one rank among several.
        machine: a whole node.
        network_bytes_per_second: what a node sends, and receives.
    """
    share, rates = job.shape.share, machine.rates
    intra_node = min(rates.upload_bytes_per_second, rates.download_bytes_per_second)
    links = (Link(intra_node, LATENCY_SECONDS), Link(network_bytes_per_second / share.ranks_per_node, LATENCY_SECONDS))
    cluster = Cluster(
        "planned",
        machine.device,
        Levels((share.ranks_per_node, share.nodes)),
        machine.device_bytes,
        machine.host_bytes,
        rates.flops_per_second,
        math.inf,
        intra_node,
        AlphaBeta(links),
    )
    trained = sum(job.shape.records[index].trained_count for index in job.shape.trainable)
    found, least = [], math.inf
    for micro_batch in (size for size in range(1, job.rows + 1) if job.rows % size == 0):
        workload = Workload.of_model(
            job.config,
            seq_len=job.seq_len,
            micro_batch=micro_batch,
            micro_batches=job.rows // micro_batch,
            trainable_ratio=trained / job.parameters,
        )
        planned = plan(workload, cluster)
        least = min(least, *(estimate.memory.device for estimate in planned.estimates))
        if planned.choice is not None:
            found.append(planned.choice)
        elif micro_batch > 1:
            break  # larger ones take more
    best = min(found, key=lambda estimate: estimate.step_seconds, default=None)
    return InMemory(best, least, machine.device_bytes)
