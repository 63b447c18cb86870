"""Times of collectives against sums done by hand, and interpolation between measurements."""

import json
import math
from pathlib import Path

import pytest

from common.errors import UserError
from fcdp.planner import load_cluster
from fcdp.planner.cluster import RING_DECAY, AlphaBeta, CollectiveTiming, Link, MeasuredRates
from fcdp.strategy.mesh import Levels, Mesh

GB = 10**9
# 100 GB/s and 1 us inside, 10 GB/s per rank and 10 us across, 5 us to begin.
RATES = AlphaBeta((Link(100e9, 1e-6), Link(10e9, 10e-6)), 5e-6)
MESH = Mesh((4, 2))


def test_one_ring_goes_at_the_pace_of_its_slowest_link() -> None:
    # 8 ranks: 7 steps, in each of which some rank sends beyond its node. The border carries 7/8 of the buffer, a
    # quarter of that per rank.
    expected = 5e-6 + 7 * 10e-6 + 7 / 8 / 4 * GB / 10e9
    assert RATES.seconds("all_gather", MESH, GB, "flat") == pytest.approx(expected)


def test_level_by_level_adds_up() -> None:
    inter_node = 10e-6 + GB / 4 / 2 / 10e9
    intra_node = 3 * 1e-6 + GB * 3 / 4 / 100e9
    expected = 2 * 5e-6 + inter_node + intra_node
    assert RATES.seconds("reduce_scatter", MESH, GB, "hierarchical") == pytest.approx(expected)
    assert RATES.seconds("all_reduce", MESH, GB, "hierarchical") == pytest.approx(2 * expected)


def test_ho_ring_hides_all_but_the_last_block_inside() -> None:
    inter_node, intra_node = GB / 4 / 2 / 10e9, GB * 3 / 4 / 100e9
    latencies = 2 * 5e-6 + 10e-6 + 3 * 1e-6
    expected = max(inter_node, intra_node / 2) + intra_node / 2 + latencies
    assert RATES.seconds("all_gather", MESH, GB, "ho") == pytest.approx(expected)


def test_small_all_reduces_over_many_nodes_take_a_tree() -> None:
    many = Mesh((8, 64))
    ring = 5e-6 + 511 * 10e-6
    tree = 5e-6 + 2 * (7 * 1e-6 + math.log2(64) * 10e-6)
    assert RATES.seconds("all_reduce", many, 0, "flat") == pytest.approx(tree)
    assert RATES.seconds("all_gather", many, 0, "flat") == pytest.approx(ring)
    # Of large ones over few nodes the ring's bandwidth is better: 2 (n-1)/n, not over 0.9.
    big, few = 100 * GB, Mesh((8, 2))
    assert RATES.seconds("all_reduce", few, big, "flat") == pytest.approx(
        2 * RATES.seconds("all_gather", few, big, "flat")
    )


def test_long_rings_are_slower() -> None:
    no_latency = AlphaBeta((Link(1e30, 0.0), Link(10e9, 0.0)))
    sixteen, long = Mesh((8, 2)), Mesh((8, 64))
    for mesh, factor in ((sixteen, 1.0), (long, 32**RING_DECAY)):
        expected = factor * (mesh.shards - 1) / mesh.shards / 8 * GB / 10e9
        assert no_latency.seconds("all_gather", mesh, GB, "flat") == pytest.approx(expected)
    level = (64 / 16) ** RING_DECAY * 63 / 64 / 8 * GB / 10e9  # each of eight rings has 64 ranks
    assert no_latency.seconds("all_gather", long, GB, "hierarchical") == pytest.approx(level)


MEASURED = MeasuredRates([
    CollectiveTiming("all_gather", "flat", (2, 2), 1000, 1.0),  # 1000 B/s
    CollectiveTiming("all_gather", "flat", (2, 2), 100_000, 10.0),  # 10,000 B/s
])  # fmt: skip


@pytest.mark.parametrize(("nbytes", "seconds"), [
    (0, 0.0),
    (1, 1.0),  # below what was measured it is all latency
    (1000, 1.0),
    (10_000, 10_000 / 5500),  # half way on the logarithm: the mean of both bandwidths
    (100_000, 10.0),
    (1_000_000, 100.0),  # above, the last bandwidth
])  # fmt: skip
def test_interpolation_of_effective_bandwidth(nbytes: int, seconds: float) -> None:
    assert MEASURED.seconds("all_gather", Mesh((2, 2)), nbytes, "flat") == pytest.approx(seconds)


def test_a_profile_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    MEASURED.save(
        path, levels=[2, 2], device_memory_bytes=8 * GB, host_memory_bytes=64 * GB, flops_per_second=1e12,
        memory_bytes_per_second=1e11, host_link_bytes_per_second=1e10,
    )  # fmt: skip
    cluster = load_cluster(str(path))
    assert cluster.levels == Levels((2, 2))
    assert isinstance(cluster.rates, MeasuredRates)
    assert cluster.rates.timings == MEASURED.timings
    with pytest.raises(UserError, match="for 4,2 there are no times"):
        cluster.resized(Levels((4, 2)))
    broken = json.loads(path.read_text())
    del broken["levels"]
    path.write_text(json.dumps(broken))
    with pytest.raises(UserError, match="is not a cluster's profile: KeyError"):
        load_cluster(str(path))
