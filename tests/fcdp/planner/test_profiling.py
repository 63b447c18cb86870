"""A profile of the cluster at hand: it has what the planner asks of it, for every strategy that is possible there."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import fcdp
from fcdp.planner import Workload, load_cluster, plan, profiling
from fcdp.planner.cluster import MeasuredRates
from fcdp.planner.profiling import measure_collectives, profile_cluster
from tests.helpers.fcdp.pool import Pool

SIZES = (512, 8192)


def _profile(topology: fcdp.Topology, path: Path) -> int:
    config = transformers.LlamaConfig(
        vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    return len(profile_cluster(topology, config, path, rows=1, seq_len=16).timings)


def _collectives(topology: fcdp.Topology, path: Path) -> None:
    measured = MeasuredRates(measure_collectives(topology, SIZES))
    if topology.rank == 0:
        facts = ("device_memory_bytes", "host_memory_bytes", "flops_per_second", "memory_bytes_per_second")
        measured.save(
            path, levels=topology.levels.sizes, host_link_bytes_per_second=1e9, **dict.fromkeys(facts, 10**10)
        )


@pytest.mark.parametrize(
    ("layout", "measure"), [((2, 2), _profile), ((2, 2, 2), _collectives)], ids=["2x2", "2x2x2"]
)
@pytest.mark.slow
def test_a_profile_serves_for_every_strategy(
    pool: Pool, tmp_path: Path, layout: tuple[int, ...], measure: object
) -> None:
    path = tmp_path / "cluster.json"
    counts = pool.run(layout, measure, path)  # type: ignore[arg-type]
    assert len(set(counts)) == 1
    cluster = load_cluster(str(path))
    assert cluster.levels.sizes == layout[::-1]
    assert (
        min(cluster.flops_per_second, cluster.memory_bytes_per_second, cluster.host_link_bytes_per_second) > 0
    )
    found = plan(Workload(1e6, 1e6, blocks=2, micro_batches=2), cluster, allow_quantized=True)
    assert len(found.estimates) > 30
    assert all(estimate.communication_seconds > 0 for estimate in found.estimates)


def test_times_travel_on_the_compute_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process group with NCCL alone takes nothing else."""
    exchanged: list[torch.Tensor] = []
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda data, **_: exchanged.append(data))
    topology: Any = SimpleNamespace(device=torch.device("meta"))
    with pytest.raises(RuntimeError, match="meta"):  # has no values
        profiling._time_on_all_ranks(topology, lambda: None)
    assert [data.device.type for data in exchanged] == ["meta"]
