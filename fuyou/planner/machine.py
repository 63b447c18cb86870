"""What a plan is made for: a machine that need not be there."""

from dataclasses import dataclass, replace

from common.hardware.presets import DrivePreset, GpuPreset
from common.units import format_bytes
from fuyou.planner.profiling import Profile
from fuyou.planner.simulator import TaskRates

#: Device memory that CUDA's context, its libraries and the allocator's slack take: the engine leaves as much.
LIBRARY_BYTES = 512 << 20
DEVICE_SHARE = 19 / 20
#: Part of the data sheet's peak that a transformer block reaches, where no measurement is at hand: 200 of 312 TFLOP/s
#: on an A100 (configs/gpus/a100-80g.toml). Consumer cards reach more (164 of 165 on an RTX 4090).
BLOCK_FRACTION = 0.64
#: Bytes that cross host memory per parameter and step: 26 between SSDs and memory, 4 to the device, 2 from it, and what
#: Adam reads and writes (10 of states, 2 of parameters and 2 of gradients in; 12 out).
MEMORY_BYTES_PER_PARAMETER = 58
#: Copy bandwidth of host memory. More than a quarter of a tebibyte does not go into a desktop.
DESKTOP_MEMORY = 256 << 30
DESKTOP_BANDWIDTH, SERVER_BANDWIDTH = 60e9, 160e9
#: Seconds that an exchange between ranks takes beside its bytes, where nobody has measured it: a round trip on Ethernet
#: through the kernel, and waking up threads on both ends.
EXCHANGE_SECONDS = 100e-6


@dataclass(frozen=True)
class Machine:
    """TaskRates and room of one computer."""

    device: str
    """What computes, for people."""
    drives: str
    """What stores, for people."""
    rates: TaskRates
    """``read_`` and ``write_bytes_per_second`` are those of all drives together, writes sustained."""
    device_bytes: int
    """Device memory that a run may use; on a CPU this is a part of the host's."""
    host_bytes: int
    """Host memory that a run may use."""
    drive_count: int = 1
    store_bytes: int | None = None
    """Room on all drives together; None if it is not known."""
    endurance_bytes: int | None = None
    """Bytes that the drives' makers warrant may be written to all of them together; None if they do not say."""
    drives_limit: float | None = None
    """Most bytes per second that the machine moves to and from all its drives, whatever their number."""
    cpu: bool = False
    """Whether the processor computes."""
    all_flops: bool = True
    """Whether the device's rate is in FLOPs that were all counted, attention's included; else only 2 per parameter and
    token were (what the task list says), for the forward pass."""
    profile: Profile | None = None
    """What was measured, if anything was."""
    assumptions: tuple[str, ...] = ()
    """What was assumed for want of a measurement, for people."""

    def with_drives(self, count: int) -> "Machine":
        """The same with ``count`` drives of the same kind."""
        factor = count / self.drive_count
        rates = replace(
            self.rates,
            read_bytes_per_second=_least(self.rates.read_bytes_per_second * factor, self.drives_limit),
            write_bytes_per_second=_least(self.rates.write_bytes_per_second * factor, self.drives_limit),
        )
        return replace(
            self, rates=rates, drive_count=count,
            store_bytes=None if self.store_bytes is None else int(self.store_bytes * factor),
            endurance_bytes=None if self.endurance_bytes is None else int(self.endurance_bytes * factor),
        )  # fmt: skip


@dataclass(frozen=True)
class RankLinks:
    """What connects a rank to the others, while all of them use theirs."""

    intra_node_bytes_per_second: float
    """To the ranks of its node, each way."""
    inter_node_bytes_per_second: float
    """To other nodes, each way."""
    message_seconds: float
    """That an exchange takes beside its bytes."""
    assumptions: tuple[str, ...] = ()
    """What was assumed for want of a measurement, for people."""

    @staticmethod
    def assumed(machine: Machine, ranks_per_node: int, network_bytes_per_second: float) -> "RankLinks":
        """Those of a cluster of such machines.

        Args:
            network_bytes_per_second: of a node, each way.
        """
        assumptions = [f"an exchange between ranks takes {EXCHANGE_SECONDS * 1e6:.0f} microseconds beside its bytes"]
        if ranks_per_node > 1:
            assumptions.append("the GPUs of a node exchange data as fast as they do with the host")
        return RankLinks(
            min(machine.rates.upload_bytes_per_second, machine.rates.download_bytes_per_second),
            network_bytes_per_second / ranks_per_node, EXCHANGE_SECONDS, tuple(assumptions),
        )  # fmt: skip


def one_of_several(machine: Machine, ranks_per_node: int, links: RankLinks) -> Machine:
    """What one rank has of its node in a cluster of such machines, each with ``ranks_per_node`` devices.

    Drives, host memory and optimizer are shared by the ranks of a node, which use them alike.
    """
    share, rates = 1 / ranks_per_node, machine.rates
    shared = replace(
        rates,
        read_bytes_per_second=rates.read_bytes_per_second * share,
        write_bytes_per_second=rates.write_bytes_per_second * share,
        adam_parameters_per_second=rates.adam_parameters_per_second * share,
        intra_node_bytes_per_second=links.intra_node_bytes_per_second,
        inter_node_bytes_per_second=links.inter_node_bytes_per_second,
        message_seconds=links.message_seconds,
    )
    return replace(
        machine, rates=shared, host_bytes=machine.host_bytes // ranks_per_node,
        store_bytes=None if machine.store_bytes is None else machine.store_bytes // ranks_per_node,
        endurance_bytes=None if machine.endurance_bytes is None else machine.endurance_bytes // ranks_per_node,
        drives_limit=None if machine.drives_limit is None else machine.drives_limit * share,
        assumptions=(*machine.assumptions, *links.assumptions),
    )  # fmt: skip


def preset_machine(
    gpu: GpuPreset,
    drive: DrivePreset,
    drive_count: int,
    host_bytes: int,
    *,
    device_bytes: int | None = None,
    drives_limit: float | None = None,
    host_bandwidth: float | None = None,
    adam_parameters_per_second: float | None = None,
) -> Machine:
    """A machine put together from presets.

    Args:
        gpu, drive: what computes and what stores.
        drive_count: how many drives, all alike.
        host_bytes: host memory that a run may use.
        device_bytes: device memory that a run may use; None takes all but what CUDA itself needs.
        drives_limit: most bytes per second that the machine moves to and from all drives; None: no limit but theirs.
        host_bandwidth: bytes per second that host memory moves; None assumes two channels of DDR5 in a desktop and
            eight of DDR4 where there is more memory than goes into one.
        adam_parameters_per_second: of the optimizer; None takes what host memory can feed.
    """
    assumptions = []
    flops = gpu.block_flops_per_second
    if flops is None:
        flops = gpu.bf16_flops_per_second * BLOCK_FRACTION
        assumptions.append(f"{gpu.title} reaches {BLOCK_FRACTION:.0%} of its peak: nobody's measurement is at hand")
    write = drive.sustained_write_bytes_per_second
    if write is None:
        write = drive.write_bytes_per_second
        assumptions.append(f"{drive.title} writes at its data sheet's rate, which few consumer drives sustain")
    if host_bandwidth is None:
        host_bandwidth = DESKTOP_BANDWIDTH if host_bytes <= DESKTOP_MEMORY else SERVER_BANDWIDTH
        if adam_parameters_per_second is None:
            assumptions.append(f"host memory moves {host_bandwidth / 1e9:.0f} GB/s, which bounds Adam")
    adam = adam_parameters_per_second or host_bandwidth / MEMORY_BYTES_PER_PARAMETER
    rates = TaskRates(
        flops,
        gpu.upload_bytes_per_second,
        gpu.download_bytes_per_second,
        _least(drive_count * drive.read_bytes_per_second, drives_limit),
        _least(drive_count * write, drives_limit),
        adam,
    )
    if device_bytes is None:
        device_bytes = int(gpu.memory_bytes * DEVICE_SHARE) - LIBRARY_BYTES
    return Machine(
        f"{gpu.title} ({format_bytes(gpu.memory_bytes)})", drive.title, rates, device_bytes, host_bytes, drive_count,
        drive_count * drive.capacity_bytes,
        None if drive.endurance_bytes is None else drive_count * drive.endurance_bytes, drives_limit,
        assumptions=tuple(assumptions),
    )  # fmt: skip


def profiled_machine(
    profile: Profile, cpu: bool, device_bytes: int, host_bytes: int, drive_count: int, store_bytes: int | None
) -> Machine:
    """The machine at hand, as it was measured.

    Args:
        profile: of the model that is to run.
        cpu: whether the processor computes.
        device_bytes, host_bytes: budgets.
        drive_count: directories that the run is spread over.
        store_bytes: room in all of them together; None if it is not asked for.
    """
    drives = f"the drive{'s' if drive_count > 1 else ''} at hand"
    return Machine(
        profile.device,
        drives,
        profile.rates(),
        device_bytes,
        host_bytes,
        drive_count,
        store_bytes,
        cpu=cpu,
        all_flops=False,
        profile=profile,
    )


def _least(rate: float, limit: float | None) -> float:
    return rate if limit is None else min(rate, limit)
