"""Which processors a process is pinned to, on machines of which only /sys is there; and pinning itself."""

import os
from pathlib import Path

import pytest

from common.memory import numa


def machine(system: Path, *nodes: str, hyperthreads: int = 0) -> Path:
    """Write /sys of a machine with these processors in each node; hyperthread i + ``hyperthreads`` is on core i."""
    for node, cores in enumerate(nodes):
        (system / f"node/node{node}").mkdir(parents=True)
        (system / f"node/node{node}/cpulist").write_text(f"{cores}\n")
    for core in range(hyperthreads):
        for cpu in (core, core + hyperthreads):
            (system / f"cpu/cpu{cpu}/topology").mkdir(parents=True)
            (system / f"cpu/cpu{cpu}/topology/thread_siblings_list").write_text(
                f"{core},{core + hyperthreads}\n"
            )
    return system


def test_ranks_share_the_cores_of_their_gpus_node(tmp_path: Path) -> None:
    system = machine(tmp_path, "0-3,8-11", "4-7,12-15", "", hyperthreads=8)  # the last has memory alone
    assert numa.cores_by_node(system) == {0: {0, 1, 2, 3, 8, 9, 10, 11}, 1: {4, 5, 6, 7, 12, 13, 14, 15}}
    everything = set(range(16))
    nodes = [0, 0, 0, 1]
    found = [numa.cores_for(nodes, rank, everything, system) for rank in range(4)]
    assert found == [(0, 8), (1, 9), (2, 3, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)]
    crowded = [numa.cores_for([1] * 5, rank, everything, system) for rank in range(5)]
    assert None not in crowded and set().union(*map(set, crowded)) == {4, 5, 6, 7, 12, 13, 14, 15}  # type: ignore[arg-type]


@pytest.mark.parametrize(("allowed", "cores"), [
    (range(16), (0, 1, 2, 3, 4, 5, 6, 7)),
    ((2, 3, 9), (2, 3)),  # a container that has parts of both nodes
    ((2, 3), None),  # pinned by somebody else
    ((9, 10), None),
])  # fmt: skip
def test_an_affinity_is_never_widened(
    allowed: tuple[int, ...], cores: tuple[int, ...] | None, tmp_path: Path
) -> None:
    system = machine(tmp_path, "0-7", "8-15")
    assert numa.cores_for([0, 1], 0, set(allowed), system) == cores


def test_machines_where_nothing_is_pinned(tmp_path: Path) -> None:
    one = machine(tmp_path / "one", "0-15")
    assert numa.cores_for([0, 0], 1, set(range(16)), one) is None
    two = machine(tmp_path / "two", "0-7", "8-15")
    assert numa.cores_for([None, 1], 0, set(range(16)), two) is None, "computes on the CPU"
    assert numa.cores_for([2], 0, set(range(16)), two) is None, "a node of memory alone"
    assert numa.cores_for([0], 0, set(range(16)), tmp_path / "none") is None, "not Linux, or hidden"


def test_pages_are_touched_on_the_gpus_node(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    core = max(before)
    system = machine(tmp_path, "1000", str(core))
    for node, inside in ((1, {core}), (0, before), (None, before)):
        with numa.prefer(node, system):
            assert os.sched_getaffinity(0) == inside
        assert os.sched_getaffinity(0) == before
