"""Rules that find what slows a run down or ends it on this machine, with remedies."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from common.hardware.drives import Drive
from common.hardware.machine import Gpu
from common.units import format_bytes, format_count


@dataclass(frozen=True)
class MachineFound:
    """Processors and memory of this machine."""

    processors: int  # Processors that this process may use
    all_processors: int
    memory_bytes: int  # Memory of the whole machine
    limit_bytes: int  # Memory that control groups allow, at most all
    available_bytes: int
    huge_pages: bool  # Whether memory gets huge pages on request
    numa_nodes: int
    governor: str | None  # Governor of the processors' clock
    has_p2p_storage: bool  # Whether the kernel module of GPUDirect Storage is loaded
    torch_cuda: str | None  # CUDA version that PyTorch was built for
    gpu_obstacle: str | None  # Why PyTorch cannot use a GPU that the system has
    is_wsl: bool = False  # Whether it runs in Windows (WSL2)


@dataclass(frozen=True)
class GpuFound:
    """A GPU of this machine."""

    gpu: Gpu
    used_bytes: int  # Bytes of its memory in use by anybody
    link_generation: int
    link_width: int  # PCI Express lanes in use; 0: unknown
    full_link_width: int  # Lanes that device and slot could have
    driver_cuda: tuple[int, int] | None  # Newest CUDA version that the driver can serve


@dataclass(frozen=True)
class DriveFound:
    """A directory for a store, with measured rates."""

    drive: Drive
    file_system_id: int  # Number of the file system
    total_bytes: int
    free_bytes: int
    direct: bool  # Whether direct I/O works
    read: float  # Bytes read per second
    write: float  # Bytes written per second past the fast cache
    burst_write: float  # Bytes written per second at first
    commit_seconds: float


@dataclass(frozen=True)
class Finding:
    """A potential problem."""

    what: str
    remedy: str = ""  # What to do about it; a command where possible
    severe: bool = False  # Whether a run will fail, or be several times slower


def find_trouble(
    machine: MachineFound, gpus: list[GpuFound], drives: list[DriveFound], store_bytes: int | None, model: str | None
) -> list[Finding]:
    """Return all findings that apply, severe ones first.

    Args:
        store_bytes: bytes that ``model`` takes on all drives together; None if unknown.
    """
    findings = [*_machine_findings(machine), *_gpu_findings(machine, gpus), *_drive_findings(gpus, drives)]
    free = _free_bytes(drives)
    if store_bytes is not None and store_bytes > free:
        findings.append(
            Finding(
                f"{model} takes {format_bytes(store_bytes)} on the drives, and {format_bytes(free)} can be used.",
                "Name more or larger drives with --ssd.",
                severe=True,
            )
        )
    return sorted(findings, key=lambda finding: not finding.severe)


def _machine_findings(machine: MachineFound) -> Iterator[Finding]:
    if not machine.huge_pages:
        yield Finding(
            "Huge pages are off: direct I/O then takes two to three times as long.",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
            severe=True,
        )
    if machine.limit_bytes < machine.memory_bytes:
        yield Finding(
            f"A control group allows {format_bytes(machine.limit_bytes)} of the machine's "
            f"{format_bytes(machine.memory_bytes)} of memory.",
            "Budgets follow that limit. To raise it: docker run --memory, sbatch --mem, or systemd's MemoryMax.",
        )
    if machine.available_bytes < 4 << 30:
        yield Finding(
            f"Only {format_bytes(machine.available_bytes)} of host memory are available.",
            "End other programs; a budget that is too small is refused with the smallest that works.",
        )
    if machine.governor == "powersave":
        yield Finding(
            "The processors' clock is governed by powersave, which slows Adam and short kernels' launches.",
            "sudo cpupower frequency-set --governor performance",
        )
    if machine.processors < 4:
        yield Finding(
            f"{machine.processors} processors have to move data, run Adam and launch kernels at the same time.",
            "Allow more: docker run --cpus, sbatch --cpus-per-task.",
        )


def _gpu_findings(machine: MachineFound, gpus: list[GpuFound]) -> Iterator[Finding]:
    if machine.gpu_obstacle is not None:
        yield Finding(
            f"The NVIDIA GPU of this machine cannot be used: {machine.gpu_obstacle}.",
            "Install a driver and a PyTorch that fit together; pytorch.org/get-started says how.",
            severe=True,
        )
    elif not gpus:
        yield Finding(
            "No NVIDIA GPU was found: the CPU computes.",
            "If there is one, nvidia-smi must show it, and CUDA_VISIBLE_DEVICES must not hide it.",
        )
    if gpus and machine.is_wsl:
        yield Finding(
            "In WSL2, device memory that runs out is taken from the host, which is slow, and CUDA page-locks little.",
            "Set Windows' NVIDIA Control Panel to 'Prefer No Sysmem Fallback', and give a low --host-memory.",
        )
    for measured in gpus:
        if measured.link_width < measured.full_link_width:
            yield Finding(
                f"{measured.gpu.name} uses {measured.link_width} of {measured.full_link_width} PCI Express "
                "lanes, which slows copies down.",
                "Put it into a slot with all lanes, or check riser and BIOS settings.",
            )
        if measured.used_bytes > measured.gpu.memory_bytes // 10:
            yield Finding(
                f"{format_bytes(measured.used_bytes)} of memory on {measured.gpu.name} are in use by others.",
                "nvidia-smi says by whom. --device-memory gives what is left as the budget.",
            )


def _drive_findings(gpus: list[GpuFound], drives: list[DriveFound]) -> Iterator[Finding]:
    shared = Counter(measured.file_system_id for measured in drives)
    for measured in drives:
        drive, where = measured.drive, measured.drive.directory
        if drive.is_in_memory:
            yield Finding(
                f"{where} is {drive.file_system}: it takes host memory instead of a drive.",
                "Give a directory on an NVMe drive with --ssd.",
                severe=True,
            )
        if drive.is_over_a_network:
            yield Finding(
                f"{where} is a network file system ({drive.file_system}).",
                "Give a directory on a local NVMe drive with --ssd; --output may stay.",
                severe=True,
            )
        if drive.is_hard_disk:
            yield Finding(f"{where} is on a hard disk.", "Give a directory on an NVMe drive with --ssd.", severe=True)
        if not measured.direct and not drive.is_in_memory:
            yield Finding(
                f"{drive.file_system or 'The file system'} of {where} has no direct I/O: the page cache takes memory.",
                "ext4 and xfs have it.",
            )
        if drive.link != drive.full_link:
            yield Finding(
                f"{drive.model or drive.device} runs at {drive.link} and could at {drive.full_link}.",
                "It is in a slower slot: move it, or check the BIOS settings.",
            )
        nodes = {drive.numa_node, *(gpu.gpu.numa_node for gpu in gpus)}
        if len(gpus) == 1 and len(nodes) == 2 and None not in nodes:
            yield Finding(
                f"{drive.model or drive.device} is at NUMA node {drive.numa_node} and the GPU at "
                f"{gpus[0].gpu.numa_node}: what moves between them crosses the processors' link.",
                "Move one of them to the other processor's slots.",
            )
        yield from _preset_findings(measured)
    for number, count in shared.items():
        if count > 1:
            same = [str(measured.drive.directory) for measured in drives if measured.file_system_id == number]
            yield Finding(
                f"{' and '.join(same)} are on one file system: they share its speed and its room.",
                "Give one directory per drive with --ssd.",
            )


def _preset_findings(measured: DriveFound) -> Iterator[Finding]:
    preset = measured.drive.preset
    if preset is None:
        return
    slow = preset.sustained_write_bytes_per_second
    if slow is not None and slow < 0.9 * preset.write_bytes_per_second:
        after = f" after {format_count(preset.cache_bytes / 1e9)} GB of writes" if preset.cache_bytes else " later"
        yield Finding(
            f"{preset.title} slows to {slow / 1e9:.2g} GB/s{after}: a run of more than a few steps meets that.",
            "Plan with it: --drive knows this drive. More drives, or --commit-every, spread the writes.",
        )
    if measured.read < 0.5 * preset.read_bytes_per_second:
        yield Finding(
            f"{preset.title} reads {measured.read / 1e9:.3g} GB/s here, and its maker says "
            f"{preset.read_bytes_per_second / 1e9:.3g}.",
            "Is it busy, hot, nearly full or encrypted?",
        )


def _free_bytes(drives: list[DriveFound]) -> int:
    """Return the room for a store striped over all drives: as much on each as the fullest has free."""
    shared = Counter(drive.file_system_id for drive in drives)
    return min(drive.free_bytes // shared[drive.file_system_id] for drive in drives) * len(drives)
