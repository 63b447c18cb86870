"""What a rank caches from use to use, and which of it stays on the device (FCDP-Cache, section IV-D of the paper).

A cached shard on the device saves two trips over PCIe per step, but must never cost a batch size. The paper looks at
memory in use when a block's forward pass is done, but a step needs most memory later, in the backward pass. So a shard
is admitted only if the *peak* of the last whole step leaves room for it below the threshold, and returns to the host if
memory in use ever passes the threshold. Each rank decides alone: either way it is a hit, with the same collectives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from common.quantisation import Bits, quantised_nbytes
from fcdp.grouping import ParameterGroup
from fcdp.strategy.routes import Routes
from fcdp.strategy.strategy import BITS


@dataclass(frozen=True)
class DeviceMemory:
    """Device memory in bytes."""

    total: int
    allocated: Callable[[], int]  # what this process has allocated through PyTorch
    others: Callable[[], int] = lambda: 0  # what is in use otherwise: contexts, NCCL's buffers, other processes

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
        """Return whether a shard that is on the device may remain."""
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
        if self._last_peak is None or max(self._last_peak, self._peak) + self.held_bytes + nbytes > self._limit:
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
            others = (
                self._memory.others()
            )  # NCCL makes its buffers in the first step, when a communicator is first used
            self._last_peak, self._peak = self._peak + max(0, others - self._others), 0
            self._others = others

    def _look(self) -> int:
        """Return the bytes in use now, and note them for the peak. 0 if nothing may be on the device."""
        if not self._memory or not self._limit:
            return 0
        in_use = self._others + self._memory.allocated()
        self._peak = max(self._peak, in_use - self.held_bytes)
        return max(in_use, 1)


@dataclass(frozen=True)
class CachedGroup:
    """A group's shard of P that is cached, or its shard in the secondary partition."""

    group: ParameterGroup
    is_secondary: bool  # whether it belongs to the secondary partition, kept from forward to backward
    block: int  # number of ranks that together hold one copy of the parameters
    nbytes: int
    in_host: bool  # whether it has a place in host memory. It may still be on the device, if the tier is adaptive.
    bits: Bits | None  # bits per element that it is quantised to; None: it is not


def all_cached(routes: Routes, groups: Sequence[ParameterGroup]) -> list[CachedGroup]:
    """Return everything that a strategy caches if there is room for it."""
    layout = routes.layout
    found = []
    if routes.caches_shards:
        block = layout.p.shards
        for group in groups:
            found.append(
                CachedGroup(group, False, block, routes.shards // block * group.cell_bytes, layout.p_in_cache, None)
            )
    if layout.secondary is not None:
        block, in_host = layout.secondary.shards, layout.cache != "device"
        for group in groups:
            if group.kept_after_forward:
                continue  # the backward pass does not gather it
            # Groups of mixed dtype are gathered as plain bytes, which nobody can quantise.
            bits = None if group.mixes_dtypes else BITS.get(layout.strategy.precision.secondary)
            cell = group.cell_bytes if bits is None else quantised_nbytes(group.cell_numel, bits)
            found.append(CachedGroup(group, True, block, routes.shards // block * cell, in_host, bits))
    return found


def fit_into(budget: int | None, wanted: Sequence[CachedGroup]) -> list[CachedGroup]:
    """Return those of ``wanted`` that fit into ``budget`` bytes of host memory (None: all), frozen groups first."""
    if budget is None:
        return list(wanted)
    chosen = set()
    for index in sorted(range(len(wanted)), key=lambda index: wanted[index].group.trainable):
        need = wanted[index].nbytes if wanted[index].in_host else 0
        if need <= budget:
            chosen.add(index)
            budget -= need
    return [wanted[index] for index in sorted(chosen)]
