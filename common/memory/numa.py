"""Host memory and threads on the same NUMA node as the GPU that they serve: another node is behind a slower link."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

_SYSTEM = Path("/sys/devices/system")


def node_of(device: torch.device) -> int | None:
    """Return the NUMA node that ``device`` is attached to; None for the CPU and where the kernel does not tell."""
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    bus_id = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    try:
        node = int(Path(f"/sys/bus/pci/devices/{bus_id}/numa_node").read_text())
    except OSError:
        return None
    return node if node >= 0 else None


@contextlib.contextmanager
def prefer(node: int | None, system: Path = _SYSTEM) -> Iterator[None]:
    """Run this thread on processors of ``node``, if it may: pages come from where they are first touched."""
    before = os.sched_getaffinity(0)
    cores = set[int]()
    if node is not None:
        with contextlib.suppress(OSError):  # what only makes a run faster fails none
            cores = cores_by_node(system).get(node, set()) & before
            if cores:
                os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        if cores:
            os.sched_setaffinity(0, before)


def cores_by_node(system: Path = _SYSTEM) -> dict[int, set[int]]:
    """Return the processors of each NUMA node that has any, hyperthreads each for itself; empty where it is unknown."""
    by_node = {}
    for path in (system / "node").glob("node[0-9]*/cpulist"):
        if cores := _parse_list(path.read_text()):
            by_node[int(path.parent.name.removeprefix("node"))] = cores
    return by_node


def cores_for(
    nodes: Sequence[int | None], index: int, allowed: set[int], system: Path = _SYSTEM
) -> tuple[int, ...] | None:
    """Return the processors that a process should run on: those of its NUMA node, or its share of them where other
    processes have the same node. Hyperthreads of one core stay together.

    None: nothing is to change, because the machine has one node, the process belongs to none, may run on none of its
    processors, or has been given one node's processors, or fewer, already.

    Args:
        nodes: the NUMA node of each process of this machine; None if none.
        allowed: processors that it may run on now.
    """
    node = nodes[index]
    by_node = cores_by_node(system)
    if node not in by_node or sum(bool(cores & allowed) for cores in by_node.values()) < 2:
        return None
    cores = by_node[node] & allowed
    together = sorted({tuple(sorted(_siblings(core, system) & cores)) for core in cores})
    position = list(nodes[:index]).count(node)
    sharers = list(nodes).count(node)
    mine = (
        together[len(together) * position // sharers : len(together) * (position + 1) // sharers] or together
    )
    return tuple(sorted(core for siblings in mine for core in siblings)) or None


def pin(cores: Sequence[int]) -> None:
    """Have all threads of this process run on ``cores`` only; PyTorch starts no more than there are."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), cores)
    torch.set_num_threads(min(torch.get_num_threads(), len(cores)))


def _siblings(core: int, system: Path) -> set[int]:
    try:
        return _parse_list((system / f"cpu/cpu{core}/topology/thread_siblings_list").read_text()) | {core}
    except OSError:
        return {core}


def _parse_list(text: str) -> set[int]:
    numbers: set[int] = set()
    for part in text.split(","):
        if part.strip():
            first, _, last = part.strip().partition("-")
            numbers |= set(range(int(first), int(last or first) + 1))
    return numbers
