"""A drive that writes a quarter as fast once its fast cache is full: what is planned, and what a run notices."""

import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from emulated.device import emulated_device
from transformers import LlamaConfig

from fuyou import Engine
from fuyou.planner import Plan, RunPlan, describe_training, profiled_machine, search
from fuyou.planner.profiling import save
from fuyou.planner.profiling.measure import measure
from fuyou.runtime.device import memory_limits

SPEC = (
    "emulated:tflops=1,memory=1GiB,link=1GB/s,ssd_read=80MB/s,ssd_write=40MB/s,ssd_cache=64MB,ssd_full=10MB/s"
)
CONFIG = LlamaConfig(
    hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4, vocab_size=512,
    max_position_embeddings=64,
)  # fmt: skip
ROWS, SEQ_LEN, HOST_MEMORY = 4, 32, 300 << 20


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory in memory, if there is one, so that other users of the machine's drives do not count."""
    where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=where) as directory:
        monkeypatch.setenv("FINETUNE_CACHE", f"{directory}/cache")
        monkeypatch.setattr("fuyou.planner.profiling.measure._TRANSFER_BYTES", 1 << 20)
        yield Path(directory)


def planned(directory: Path, *, past_cache: bool = False) -> Plan:
    device = emulated_device(SPEC)
    job = describe_training(CONFIG, ROWS, SEQ_LEN, host_cache=0, drive_life=0)
    host, memory = memory_limits(device, HOST_MEMORY, None)
    context = RunPlan(job, device, (host, memory), [directory])
    profile = context.profile or save(
        measure(context.workload, device, past_cache=past_cache), context.workload, device
    )
    return search(job, profiled_machine(profile, False, memory, host, [directory], None))


def run(directory: Path, most: int) -> tuple[float, list[str]]:
    """Return the seconds of a step past the fast cache, and what the engine said."""
    ids = torch.zeros(ROWS, SEQ_LEN, dtype=torch.long)
    with warnings.catch_warnings(record=True) as caught, Engine(
        CONFIG, ssd=[directory], device=emulated_device(SPEC), host_memory=HOST_MEMORY, host_cache=0, dtype="bf16",
        batch_shape=(ROWS, SEQ_LEN), automatic=True, drive_life=0, overwrite=True,
    ) as engine:  # fmt: skip
        warnings.simplefilter("always")
        ended = []
        for _ in range(most):
            engine(input_ids=ids, labels=ids).loss.backward()
            engine.step()
            ended.append(time.monotonic())
        engine.flush()
        assert engine.io_bytes() == engine.planned_io_bytes()
    seconds = [after - before for before, after in pairwise(ended[-6:])]
    return statistics.median(seconds), [
        str(each.message) for each in caught if "drives write" in str(each.message)
    ]


@pytest.mark.slow
def test_a_run_notices_a_full_cache_and_the_next_plan_counts_on_it(memory: Path) -> None:
    burst = planned(memory)
    measured, said = run(memory, 17)
    assert burst.step_seconds < 0.5 * measured
    assert len(said) == 1 and "GB/s were planned: their fast cache is full" in said[0], said
    written, expected = (float(said[0].split(word)[1].split(" GB/s")[0]) for word in ("write ", ", and "))
    assert (written, expected) == (pytest.approx(0.01, rel=0.2), pytest.approx(0.04, rel=0.2))
    assert planned(memory).step_seconds == pytest.approx(measured, rel=0.2)  # 0.1 on an idle machine


@pytest.mark.slow
def test_a_profile_past_the_cache_plans_the_step_that_is_measured(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fuyou.planner.profiling.measure.PAST_CACHE_SECONDS", 6.0)
    monkeypatch.setattr("fuyou.planner.profiling.measure.SETTLED_SECONDS", 1.0)
    before = planned(memory, past_cache=True)
    measured, said = run(memory, 13)
    assert not said
    assert before.step_seconds == pytest.approx(measured, rel=0.2)  # 0.1 on an idle machine
