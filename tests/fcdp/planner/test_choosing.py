"""Several ranks take what one of them has chosen, and are otherwise as they were."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

import fcdp
from fuyou.layout.record import Precision
from fuyou.planner import PlannerContext, describe_training
from fuyou.planner.choose_settings import measure_links
from fuyou.planner.profiling import save
from fuyou.runtime.device import memory_limits, open_device
from fuyou.runtime.ranks import Agreement, share_of
from tests.helpers.fcdp import engine_cases as cases
from tests.helpers.fcdp.engine_cases import Run
from tests.helpers.fcdp.pool import Pool
from tests.helpers.profiles import PROFILE

SEQ_LEN = 12


def context_of(topology: fcdp.Topology, run: Run) -> PlannerContext:
    device, share = open_device("cpu"), share_of(topology)
    job = describe_training(run.model, run.rows, SEQ_LEN, precision=Precision.named("fp32")).among(share)
    limits = memory_limits(device, cases.OPTIONS["host_memory"], None, share.ranks_per_node)
    return PlannerContext(job, device, limits, cases.directories(run.folder, topology.rank, run.ssds))


def train_as_chosen(topology: fcdp.Topology, run: Run, cache: Path) -> cases.Outcome:
    """Only the first rank has a profile."""
    os.environ["FINETUNE_CACHE"] = str(cache / f"rank{topology.rank}")
    rows = run.rows // topology.world_size
    if topology.rank == 0:
        context = context_of(topology, run)
        slow = replace(  # of computing, so that outputs are worth keeping
            PROFILE, tokens=rows * SEQ_LEN, block_parameters=context.job.block_parameters // 3,
            block_forward_seconds=0.1, block_backward_seconds=0.3, measured_at=time.time(),
        )  # fmt: skip
        save(slow, context.workload, context.device)
    try:
        return cases.train(topology, replace(run, options={**run.options, "batch_shape": (rows, SEQ_LEN)}))
    finally:
        del os.environ["FINETUNE_CACHE"]


@pytest.mark.parametrize("layout", [(2, 1), (1, 2)])
@pytest.mark.slow
def test_the_first_rank_chooses_for_all(layout: tuple[int, int], model: str, pool: Pool, tmp_path: Path) -> None:
    run = Run(model, tmp_path / "ranks", 3, options={"dtype": "fp32", "automatic": True})
    ranks = pool.run(layout, train_as_chosen, run, tmp_path / "cache")
    assert ranks[0].kept == ranks[1].kept > 0
    alone = cases.train(None, replace(run, folder=tmp_path / "alone", options={"dtype": "fp32", "micro_batch": 2}))
    for rank in ranks:
        assert rank.losses == alone.losses


def links(topology: fcdp.Topology) -> tuple[float, float, float]:
    found = measure_links(topology, open_device("cpu"), Agreement(share_of(topology)))
    return found.intra_node_bytes_per_second, found.inter_node_bytes_per_second, found.message_seconds


def test_links_are_measured_where_there_are_any(pool: Pool) -> None:
    """Slower than memory. All ranks hear the same."""
    everyone = pool.run((2, 1), links)
    intra_node, inter_node, message = everyone[0]
    assert everyone[1] == everyone[0]
    assert intra_node == float("inf") and 0 < inter_node < 1e12 and message > 0
