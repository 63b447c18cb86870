"""The machine that a plan is made for: measured, or put together from presets."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from common.errors import UserError
from common.hardware.compute_rates import ComputeRates
from common.hardware.directory_drive import UNKNOWN_ENDURANCE, warranted_bytes
from common.hardware.presets import TLC_BYTES_PER_SECOND, DrivePreset, GpuPreset
from common.units import format_bytes
from fuyou.planner.profiling import Profile
from fuyou.planner.simulator import TaskRates
from fuyou.runtime.device import budgets_of_one_memory

LIBRARY_BYTES = 512 << 20  # Device memory for CUDA's context, its libraries, and the allocator's slack
DEVICE_SHARE = 19 / 20
# Seconds that the engine's main thread works for a block, forward and backward, for any number of tokens: measured
# on a CPU, 1.8 to 1.9 ms and 5.0 (all weights) to 6.8 ms (LoRA).
HOST_SECONDS = (0.002, 0.006)
# Bytes that host memory moves per parameter and step. Of parameters and gradients: 6 between SSDs and memory, 4 to the
# device, 2 from it, 4 that the optimizer reads and 2 that it writes. Each byte of its states: both ways to the SSDs,
# and read and written.
MEMORY_BYTES_PER_PARAMETER = 18
MEMORY_BYTES_PER_STATE_BYTE = 4
DESKTOP_MEMORY = 256 << 30  # Most memory of a desktop
# Assumed bytes per second of host memory: two channels of DDR5 in a desktop, eight of DDR4 in a server.
DESKTOP_BANDWIDTH = 60e9
SERVER_BANDWIDTH = 160e9
# Assumed seconds that an exchange between ranks takes besides its bytes: a round trip on Ethernet through the kernel,
# and waking up threads on both ends.
EXCHANGE_SECONDS = 100e-6


@dataclass(frozen=True)
class Machine:
    """Rates, memory, and drive space of one computer."""

    device: str  # Name of what computes
    drives: str  # Name of the drives
    # Rates of its parts; reads and writes are those of all drives together, writes sustained
    rates: TaskRates
    device_bytes: int  # Device memory that a run may use; on a CPU this is a part of the host's
    host_bytes: int  # Host memory that a run may use
    drive_count: int = 1
    store_bytes: int | None = None  # Bytes that all drives together have room for; None if it is not known
    endurance_bytes: int | None = None  # Warranted writes of all drives together, if known
    cpu: bool = False  # Whether the CPU is the device
    # Measurements of this machine, if there are any, whose FLOPs are 2 per parameter and token of the forward pass, as
    # tasks count them; otherwise the device's rate counts all FLOPs, attention's included.
    profile: Profile | None = None
    assumptions: tuple[str, ...] = ()  # Sentences that say what was assumed without a measurement
    compute: ComputeRates | None = None  # Rates of the device's parts, from a preset; None: see ``profile``

    def drive_days(self, written_bytes: float, step_seconds: float) -> float:
        """Return the days until the warranted writes are used up by steps that write ``written_bytes``.

        Raises:
            UserError: if they are not known.
        """
        if self.endurance_bytes is None:
            raise UserError(UNKNOWN_ENDURANCE.format(drives=self.drives))
        return self.endurance_bytes * step_seconds / (written_bytes * 86400) if written_bytes else math.inf


@dataclass(frozen=True)
class RankLinks:
    """Links of a rank to the others, while all ranks use theirs."""

    intra_node_bytes_per_second: float  # Bytes per second to the ranks of its node, each way
    inter_node_bytes_per_second: float  # Bytes per second to other nodes, each way
    message_seconds: float  # Seconds that an exchange takes besides its bytes
    assumptions: tuple[str, ...] = ()  # Sentences that say what was assumed without a measurement

    @staticmethod
    def assumed(machine: Machine, ranks_per_node: int, network_bytes_per_second: float) -> "RankLinks":
        """Return the links in a cluster of such machines.

        Args:
            network_bytes_per_second: bytes per second between a node and the others, each way.
        """
        assumptions = [
            f"an exchange between ranks takes {EXCHANGE_SECONDS * 1e6:.0f} microseconds besides its bytes"
        ]
        if ranks_per_node > 1:
            assumptions.append("the GPUs of a node exchange data as fast as they do with the host")
        return RankLinks(
            min(machine.rates.upload_bytes_per_second, machine.rates.download_bytes_per_second),
            network_bytes_per_second / ranks_per_node,
            EXCHANGE_SECONDS,
            tuple(assumptions),
        )


def machine_of_one_rank(machine: Machine, ranks_per_node: int, links: RankLinks) -> Machine:
    """Return what one rank has of its node; drives, host memory, and optimizer are shared evenly."""
    share = 1 / ranks_per_node
    rates = machine.rates
    shared = replace(
        rates,
        read_bytes_per_second=rates.read_bytes_per_second * share,
        write_bytes_per_second=rates.write_bytes_per_second * share,
        adam_parameters_per_second=rates.adam_parameters_per_second * share,
        exchanges_in_one_order=not machine.cpu,
        intra_node_bytes_per_second=links.intra_node_bytes_per_second,
        inter_node_bytes_per_second=links.inter_node_bytes_per_second,
        message_seconds=links.message_seconds,
    )
    return replace(
        machine,
        rates=shared,
        host_bytes=machine.host_bytes // ranks_per_node,
        store_bytes=None if machine.store_bytes is None else machine.store_bytes // ranks_per_node,
        endurance_bytes=None
        if machine.endurance_bytes is None
        else machine.endurance_bytes // ranks_per_node,
        assumptions=(*machine.assumptions, *links.assumptions),
    )


def preset_machine(
    gpu: GpuPreset,
    drive: DrivePreset,
    drive_count: int,
    host_bytes: int,
    *,
    device_bytes: int | None = None,
    state_bytes: float = 10,
) -> Machine:
    """Return a machine from presets.

    Args:
        host_bytes: host memory that a run may use, the device's part included if they share it.
        device_bytes: device memory that a run may use; None for all but what CUDA needs, or for half of what is shared.
        state_bytes: bytes of optimizer states per parameter.
    """
    assumptions = []
    write = drive.sustained_write_bytes_per_second
    if gpu.like is not None:
        assumptions.append(
            f"the GPU reaches as much of its peak as the preset {gpu.like}: its rates are not known"
        )
    if write is None:
        write = min(drive.write_bytes_per_second, TLC_BYTES_PER_SECOND)
        assumptions.append(
            f"drives write {write / 1e9:g} GB/s when their fast cache is full, as a 980 PRO does"
        )
    host_bandwidth = DESKTOP_BANDWIDTH if host_bytes <= DESKTOP_MEMORY else SERVER_BANDWIDTH
    assumptions.append(f"host memory moves {host_bandwidth / 1e9:.0f} GB/s, which bounds Adam")
    rates = TaskRates(
        gpu.compute.dense,
        gpu.upload_bytes_per_second,
        gpu.download_bytes_per_second,
        drive_count * drive.read_bytes_per_second,
        drive_count * write,
        host_bandwidth / (MEMORY_BYTES_PER_PARAMETER + MEMORY_BYTES_PER_STATE_BYTE * state_bytes),
        host_seconds=HOST_SECONDS,
    )
    is_requested = device_bytes is not None
    if device_bytes is None:
        device_bytes = int(gpu.memory_bytes * DEVICE_SHARE) - LIBRARY_BYTES
    if gpu.is_integrated:
        host_bytes, device_bytes = budgets_of_one_memory(host_bytes, device_bytes, is_requested)
        assumptions.append(
            f"of the memory that GPU and host share, the GPU has {format_bytes(device_bytes)} (--device-memory)"
        )
    return Machine(
        f"{gpu.title} ({format_bytes(gpu.memory_bytes)})",
        drive.title,
        rates,
        device_bytes,
        host_bytes,
        drive_count,
        drive_count * drive.capacity_bytes,
        None if drive.endurance_bytes is None else drive_count * drive.endurance_bytes,
        assumptions=tuple(assumptions),
        compute=gpu.compute,
    )


def profiled_machine(
    profile: Profile,
    cpu: bool,
    device_bytes: int,
    host_bytes: int,
    directories: Sequence[Path],
    store_bytes: int | None,
) -> Machine:
    """Return this machine, as measured.

    Args:
        cpu: whether the CPU is the device.
        device_bytes, host_bytes: memory that a run may use.
        directories: directories of the run, one per drive.
        store_bytes: space in all of them together; None to ignore it.
    """
    drives = f"the drive{'s' if len(directories) > 1 else ''} at hand"
    at_first = profile.write_bytes_per_second == profile.burst_write_bytes_per_second
    assumptions = ("drives keep writing as fast as at first: finetune profile measures what follows",)
    return Machine(
        profile.device,
        drives,
        profile.rates(),
        device_bytes,
        host_bytes,
        len(directories),
        store_bytes,
        warranted_bytes(directories),
        cpu=cpu,
        assumptions=assumptions if at_first else (),
        profile=profile,
    )
