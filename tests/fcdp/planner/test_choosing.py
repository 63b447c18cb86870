"""Several ranks take what one of them has chosen, and are otherwise as they were."""

import os
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from emulated.throttle import IoThrottle

import fcdp
from fuyou.layout.record import Precision
from fuyou.planner import RunPlan, describe_training
from fuyou.planner.choose_settings import measure_links
from fuyou.planner.profiling import save
from fuyou.runtime.device import Device, memory_limits, open_device
from fuyou.runtime.ranks import Agreement, share_of
from tests.helpers.fcdp import engine_cases as cases
from tests.helpers.fcdp.engine_cases import Run
from tests.helpers.fcdp.pool import Pool
from tests.helpers.profiles import PROFILE

SEQ_LEN = 12


def context_of(topology: fcdp.Topology, run: Run) -> RunPlan:
    device, share = open_device("cpu"), share_of(topology)
    job = describe_training(run.model, run.rows, SEQ_LEN, precision=Precision.named("fp32")).among(share)
    limits = memory_limits(device, cases.OPTIONS["host_memory"], None, share.ranks_per_node)
    return RunPlan(job, device, limits, cases.directories(run.folder, topology.rank, run.ssds))


def train_as_chosen(topology: fcdp.Topology, run: Run, cache: Path, **rates: float) -> cases.Outcome:
    """Only the first rank has a profile."""
    os.environ["FINETUNE_CACHE"] = str(cache / f"rank{topology.rank}")
    rows = run.rows // topology.world_size
    if topology.rank == 0:
        context = context_of(topology, run)
        slow = replace(  # of computing, so that outputs are worth keeping
            PROFILE, tokens=rows * SEQ_LEN, block_parameters=context.job.block_parameters // 3,
            block_forward_seconds=0.1, block_backward_seconds=0.3, measured_at=time.time(), **rates,
        )  # fmt: skip
        save(slow, context.workload, context.device)
    try:
        return cases.train(topology, replace(run, options={**run.options, "batch_shape": (rows, SEQ_LEN)}))
    finally:
        del os.environ["FINETUNE_CACHE"]


@pytest.mark.parametrize("layout", [(2, 1), (1, 2)])
@pytest.mark.slow
def test_the_first_rank_chooses_for_all(
    layout: tuple[int, int], model: str, pool: Pool, tmp_path: Path
) -> None:
    run = Run(model, tmp_path / "ranks", 3, options={"dtype": "fp32", "automatic": True})
    ranks = pool.run(layout, train_as_chosen, run, tmp_path / "cache")
    assert ranks[0].kept == ranks[1].kept > 0
    alone = cases.train(
        None, replace(run, folder=tmp_path / "alone", options={"dtype": "fp32", "micro_batch": 2})
    )
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


WRITES = 4e6  # Bytes per second that are planned; the second rank's drives write a tenth as fast


def watched(topology: fcdp.Topology, run: Run, cache: Path) -> tuple[list[str], float]:
    """Return what a rank warns of, and the rate of writes that its next plan counts on."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(Device, "shares_host_memory", False)  # as on a GPU, whose computing slows no writes
        if topology.rank == 1:
            patch.setattr(Device, "throttle", IoThrottle(1e12, WRITES / 10))
        train_as_chosen(topology, run, cache, write_bytes_per_second=WRITES)
        patch.setenv("FINETUNE_CACHE", str(cache / f"rank{topology.rank}"))
        profile = context_of(topology, run).profile
    said = [str(each.message) for each in caught if "The drives" in str(each.message)]
    return said, 0.0 if profile is None else profile.write_bytes_per_second


@pytest.mark.slow
def test_every_rank_watches_its_drives_and_the_first_warns_once(
    model: str, pool: Pool, tmp_path: Path
) -> None:
    run = Run(model, tmp_path / "ranks", 9, options={"dtype": "fp32", "automatic": True, "host_cache": 0})
    (said, rate), (other, none) = pool.run((2, 1), watched, run, tmp_path / "cache")
    assert (
        len(said) == 1 and "The drives of rank 1 write" in said[0] and "0.004 GB/s were planned" in said[0]
    ), said
    assert rate == pytest.approx(WRITES / 10, rel=0.3)
    assert (other, none) == ([], 0.0)
