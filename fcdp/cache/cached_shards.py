"""What a rank caches from use to use (FCDP-Cache, section IV-D of the paper), and where it lies.

A cached shard is ``[n, c]``: the cells of n ranks, those with this rank's place in the blocks of ranks that hold one
copy of the parameters together (in FCDP: the n nodes). Host memory is mapped once, page-locked for CUDA, on the GPU's
NUMA node. A shard on the device saves two trips over PCIe per step, but must never cost a batch size, and a step needs
most memory in the backward pass. So a shard is admitted only if the *peak* of the last whole step leaves room for it
below the threshold, and returns to the host if memory in use ever passes the threshold. Each rank decides alone: either
way it is a hit, with the same collectives.

On CUDA gathers run on a stream of FSDP2's, the current one in every call here; copies to the host on ``outward``; what
touches a shard on the device on ``inward``. A copy inward waits only until the output is allocated and the shard is
filled, so it overtakes the gather before it. A copy outward reads an output that FSDP2 may free at any time: the output
is held until the stream that gets its memory back waits for the copy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from common.memory import numa
from common.memory.buffers import PAGE, HostBuffer, round_up
from common.quantization import Bits, quantize, quantized_nbytes
from fcdp.grouping import ParameterGroup
from fcdp.strategy.strategy import BITS, Routes
from fcdp.traffic import Traffic


@dataclass(frozen=True)
class DeviceMemory:
    """Device memory in bytes."""

    total: int
    allocated: Callable[[], int]  # what this process has allocated through PyTorch
    # What is in use otherwise: contexts, NCCL's buffers, other processes
    others: Callable[[], int] = lambda: 0

    @classmethod
    def of(cls, device: torch.device) -> "DeviceMemory | None":
        """Return a CUDA device's memory, in which PyTorch's unused cache counts as free; None for the CPU."""
        if device.type != "cuda":
            return None

        def others() -> int:
            free, total = torch.cuda.mem_get_info(device)
            return total - free - torch.cuda.memory_reserved(device)

        return cls(torch.cuda.mem_get_info(device)[1], lambda: torch.cuda.memory_allocated(device), others)


class AlwaysOnDevice:
    """The rule of the tier ``device``: every shard is on the device, always."""

    def admit(self, nbytes: int) -> bool:
        """Return whether a shard of ``nbytes`` may go to the device; if so it is counted as held."""
        return True

    def may_stay(self) -> bool:
        return True

    def leave(self, nbytes: int) -> None:
        """Count a shard of ``nbytes`` as no longer on the device."""


class AdaptivePlacement(AlwaysOnDevice):
    """The rule of the tier ``adaptive``: on the device while less than ``threshold`` (0 to 1) of it is in use."""

    def __init__(self, memory: DeviceMemory | None, threshold: float):
        self._memory = memory
        self._limit = int(threshold * memory.total) if memory and threshold > 0 else 0
        self._others = memory.others() if memory else 0
        self.held_bytes = 0  # bytes of cached shards on the device now
        self._peak = 0  # most bytes in use by everything but cached shards, this step
        self._last_peak: int | None = None  # the same in the last whole step

    def admit(self, nbytes: int) -> bool:
        if not self._look():
            return False
        if (
            self._last_peak is None
            or max(self._last_peak, self._peak) + self.held_bytes + nbytes > self._limit
        ):
            return False
        self.held_bytes += nbytes
        return True

    def may_stay(self) -> bool:
        return self._look() <= self._limit and self._limit > 0

    def leave(self, nbytes: int) -> None:
        self.held_bytes -= nbytes

    def end_step(self) -> None:
        """Note that the optimizer has stepped: what was seen since the last time was a whole step."""
        if self._memory and self._limit:
            others = self._memory.others()  # NCCL makes its buffers when a communicator is first used
            self._last_peak = self._peak + max(0, others - self._others)
            self._peak = 0
            self._others = others

    def _look(self) -> int:
        """Return the bytes in use now, and note them for the peak. 0 if nothing may be on the device."""
        if not self._memory or not self._limit:
            return 0
        in_use = self._others + self._memory.allocated()
        self._peak = max(self._peak, in_use - self.held_bytes)
        return max(in_use, 1)


@dataclass
class CopyStreams:
    """The streams of a device next to FSDP2's, and the gather outputs that copies outward still read."""

    inward: torch.cuda.Stream
    outward: torch.cuda.Stream
    # For ``unshard(async_op=True)``; one, as PyTorch caches freed memory by stream
    unshard: torch.cuda.Stream
    # Copies that may not have ended: what each reads from, the stream that gets that memory back, and the copy's end
    pending: list[tuple[torch.Tensor, torch.cuda.Stream, torch.cuda.Event]] = field(default_factory=list)

    @classmethod
    def on(cls, device: torch.device) -> "CopyStreams | None":
        """Make the streams; None for the CPU, where copies are calls that return when done."""
        if device.type != "cuda":
            return None
        inward, outward, unshard = (torch.cuda.Stream(device, priority=-1) for _ in range(3))
        return cls(inward, outward, unshard)

    def release(self) -> None:
        """Order streams after all pending reads of what was allocated on them, and drop the references to that."""
        for _, allocated_on, done in self.pending:
            allocated_on.wait_event(done)
        self.pending.clear()


class HostCache:
    """Host memory for the cached shards of all groups, ``sizes`` bytes each in the order of :meth:`allocate`."""

    def __init__(self, sizes: list[int], device: torch.device):
        self.nbytes = sum(sizes)  # bytes of all shards; the mapping is up to a page larger for each
        self._free = 0
        self._buffer: HostBuffer | None = None
        if sizes:
            ends = list(accumulate(round_up(size, PAGE) for size in sizes))
            with numa.prefer(numa.node_of(device)):
                self._buffer = HostBuffer(ends[-1]).touch()
            if device.type == "cuda":
                self._buffer.page_lock(ends)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return the next ``uint8 [nbytes]``, which begins on a new page."""
        assert self._buffer is not None
        part = self._buffer.tensor(torch.uint8, self._free, nbytes)
        self._free += round_up(nbytes, PAGE)
        return part

    def close(self) -> None:
        """Unlock and unmap, once the last tensor over it is dropped. Copies must have ended."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None


@dataclass(frozen=True)
class CachedGroup:
    """A group's shard of P that is cached, or its shard in the secondary partition."""

    group: ParameterGroup
    is_secondary: bool  # whether it belongs to the secondary partition, kept from forward to backward
    block: int  # number of ranks that together hold one copy of the parameters
    nbytes: int
    # Whether it has a place in host memory. It may still be on the device, if the tier is adaptive.
    in_host: bool
    bits: Bits | None  # bits per element that it is quantized to; None: it is not


class CachedShard:
    """A group's cached shard: written by a gather, read by later ones until the group is dirty.

    ``host`` is ``uint8 [nbytes]``, None if the shard is always on the device. On the CPU there are no ``streams``."""

    def __init__(
        self,
        cached: CachedGroup,
        host: torch.Tensor | None,
        streams: CopyStreams | None,
        placement: AlwaysOnDevice,
        traffic: Traffic,
    ):
        self.block = cached.block
        self.nbytes = cached.nbytes
        self.bits = cached.bits
        self.consumed = True  # whether a secondary shard has been used, or is not filled yet
        self._host = host
        self._streams = streams
        self._placement = placement
        self._traffic = traffic
        self._device: torch.Tensor | None = None
        self._on_host = False  # the host copy is the newest, too
        self._filled: torch.cuda.Event | None = None
        self._loaded: torch.cuda.Event | None = None

    def of(self, cells: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the cells ``[n, c]`` of ``cells`` ``[n * block, c]`` that ``rank`` caches."""
        return cells.view(-1, self.block, cells.size(1))[:, rank % self.block]

    def fits(self, cells: torch.Tensor) -> bool:
        """Return whether the shard has the size that parameters have now: their dtype may change as they are frozen."""
        if self.bits is not None and not cells.is_floating_point():
            return False
        cell = (
            cells.size(1) * cells.element_size()
            if self.bits is None
            else quantized_nbytes(cells.size(1), self.bits)
        )
        return self.nbytes * self.block == cells.size(0) * cell

    def store(
        self,
        cells: torch.Tensor,
        rank: int,
        output: torch.Tensor,
        allocated_on: torch.cuda.Stream | None = None,
    ) -> None:
        """Cache this rank's part of ``cells``, which lie in ``output``, which the current stream has filled."""
        shard = self.of(cells, rank)
        if self.bits is not None:
            shard = output = quantize(shard, self.bits)
            allocated_on = None
        if self._device is not None and not self._placement.may_stay():
            self._drop_device()
        keep = self._device is not None or self._placement.admit(self.nbytes)
        self._on_host = not keep
        stream: torch.cuda.Stream | None = None
        if self._streams is not None:
            stream = self._streams.inward if keep else self._streams.outward
            stream.wait_stream(torch.cuda.current_stream())
            if self._loaded is not None:
                stream.wait_event(self._loaded)
        with torch.cuda.stream(stream):  # nothing without a stream
            if keep:
                self._device = _copy_cells(shard, self._device)
            else:
                _copy_cells(shard, self._host_view(shard))
                self._traffic.device_to_host += self.nbytes
        if self._streams is not None and stream is not None:
            self._filled = stream.record_event()
            self._streams.pending.append((output, allocated_on or torch.cuda.current_stream(), self._filled))

    def load(self, shard: torch.Tensor, mine: int, allocated: torch.cuda.Event | None) -> None:
        """Fill ``shard`` ``[n, c]`` except cell ``mine``. The current stream is ordered after the copies."""
        inward = None if self._streams is None else self._streams.inward
        for event in (allocated, self._filled):
            if inward is not None and event is not None:
                inward.wait_event(event)
        with torch.cuda.stream(inward):
            _copy_cells(self._newest(shard), shard, skip=mine)
        if inward is not None:
            self._loaded = inward.record_event()
            torch.cuda.current_stream().wait_event(self._loaded)

    def cell(self, shard: torch.Tensor, index: int) -> torch.Tensor:
        """Return cell ``index`` ``[c]`` of a shard like ``shard`` where it lies now. For the CPU."""
        return self._device[index] if self._device is not None else self._host_view(shard)[index]

    def _newest(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the shard where it should be read from, after moving it between tiers if the rule requires it."""
        if self._device is not None and not self._placement.may_stay():
            if not self._on_host:
                _copy_cells(self._device, self._host_view(shard))
                self._traffic.device_to_host += self.nbytes
                self._on_host = True
            self._drop_device()
            if self._streams is not None:
                self._filled = self._streams.inward.record_event()
        elif self._device is None and self._placement.admit(self.nbytes):
            self._device = torch.empty_like(shard, memory_format=torch.contiguous_format)
            self._device.copy_(self._host_view(shard), non_blocking=True)
            self._traffic.host_to_device += self.nbytes
        if self._device is not None:
            return self._device
        self._traffic.host_to_device += self.nbytes // shard.size(0) * (shard.size(0) - 1)
        return self._host_view(shard)

    def _drop_device(self) -> None:
        """Free the device copy. It was made and used on ``inward`` alone, so reusing its memory there is safe."""
        self._device = None
        self._placement.leave(self.nbytes)

    def _host_view(self, shard: torch.Tensor) -> torch.Tensor:
        assert self._host is not None
        return self._host.view(shard.dtype).view(shard.shape)


def _copy_cells(source: torch.Tensor, target: torch.Tensor | None, skip: int = -1) -> torch.Tensor:
    """Copy ``[n, c]`` cell by cell: each is contiguous, so each is one plain, asynchronous copy."""
    if target is None:
        target = torch.empty_like(source, memory_format=torch.contiguous_format)
    for index in range(source.size(0)):
        if index != skip:
            target[index].copy_(source[index], non_blocking=True)
    return target


def all_cached(routes: Routes, groups: Sequence[ParameterGroup]) -> list[CachedGroup]:
    """Return everything that a strategy caches if there is room for it."""
    layout = routes.layout
    candidates = []
    if routes.caches_shards:
        block = layout.p.shards
        cells = routes.shards // block
        candidates = [
            CachedGroup(each, False, block, cells * each.cell_bytes, layout.p_in_cache, None)
            for each in groups
        ]
    if layout.secondary is not None:
        block = layout.secondary.shards
        in_host = layout.cache != "device"
        for group in groups:
            if group.kept_after_forward:
                continue  # the backward pass does not gather it
            # Groups of mixed dtype are gathered as plain bytes, which cannot be quantized.
            bits = None if group.mixes_dtypes else BITS.get(layout.strategy.precision.secondary)
            cell = group.cell_bytes if bits is None else quantized_nbytes(group.cell_numel, bits)
            candidates.append(CachedGroup(group, True, block, routes.shards // block * cell, in_host, bits))
    return candidates


def fit_into(budget: int | None, candidates: Sequence[CachedGroup]) -> list[CachedGroup]:
    """Return those of ``candidates`` that fit into ``budget`` bytes of host memory (None: all), frozen groups first."""
    if budget is None:
        return list(candidates)
    chosen = set()
    for index in sorted(range(len(candidates)), key=lambda index: candidates[index].group.trainable):
        need = candidates[index].nbytes if candidates[index].in_host else 0
        if need <= budget:
            chosen.add(index)
            budget -= need
    return [candidates[index] for index in sorted(chosen)]
