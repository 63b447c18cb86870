"""The all-gather of a parameter group: axis after axis, from this rank's cached shard or from other ranks.

FSDP2 hands over an output of one cell for each rank of OS's scope, this rank's already in place. The further apart
ranks are, the earlier they exchange, when least has been gathered (``[.., rank on the axis, .., cell]``):

1. *spread*, if the group is dirty: along the axes between P's scope and OS's. Where P is sharded, and less finely than
   OS, the result is this rank's shard of P, and is cached (FCDP-Sched's cache, PaRO's P); until the next step, step 1
   is a copy from there.
2. *gather*: along the axes inside P's scope; none where P is not sharded and FSDP2 keeps it until it changes.

The secondary partition (ZeRO++) is cached the same way: stored when everything has been gathered, and used once, in the
backward pass. On CUDA everything is enqueued in order and the host never waits. On the CPU the messages of the first
axis are in flight when the call returns, and the rest is done when FSDP2 waits for the group."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

from common.communication import Wait
from common.quantization import dequantize, quantize
from fcdp import fsdp2
from fcdp.cache.cached_shards import CachedShard, CopyStreams
from fcdp.cache.staleness import StalenessCheck
from fcdp.comms.rank_level import CommLevel, all_gather, nothing
from fcdp.grouping import ParameterGroup
from fcdp.traffic import Traffic


class PendingGather(dist.Work):
    """The second half of a gather, which is done when FSDP2 waits."""

    def __init__(self, finish: Callable[[], None]):
        super().__init__()
        self._finish: Callable[[], None] | None = finish

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Finish the gather. Idempotent."""
        finish = self._finish
        self._finish = None
        if finish is not None:
            finish()
        return True


@dataclass(frozen=True)
class GatherLevels:
    """The axes of a gather, slowest first."""

    spread: Sequence[CommLevel]  # axes from OS's scope to P's
    gather: Sequence[CommLevel]  # axes inside P's scope
    secondary: Sequence[CommLevel]  # axes inside the scope of the secondary partition


class StagedAllGather:
    """FSDP2's all-gather for one parameter group.

    ``index`` is this rank's place in the block of ranks over which FSDP2 shards, and their number; ``cached`` its
    shard of P, and ``secondary`` that of the secondary partition, if it has them. On the CPU there are no ``streams``.
    """

    def __init__(
        self,
        group: ParameterGroup,
        index: tuple[int, int],
        levels: GatherLevels,
        cached: CachedShard | None,
        secondary: CachedShard | None,
        streams: CopyStreams | None,
        staleness: StalenessCheck,
        traffic: Traffic,
    ):
        self.group = group
        self.cached = cached
        self.secondary = secondary
        self._rank, self._ranks = index
        self._levels = levels
        self._streams = streams
        self._staleness = staleness
        self._traffic = traffic
        self._allocated: torch.cuda.Event | None = None
        self._allocated_on: torch.cuda.Stream | None = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory for the output, which may be written to on the current stream from now on."""
        output = torch.empty(*size, dtype=dtype, device=device)
        if self._streams is not None:
            self._streams.release()
            self._allocated_on = torch.cuda.current_stream()
            self._allocated = self._allocated_on.record_event()
        return output

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill ``output_tensor`` ``[ranks * c]``, whose part ``input_tensor`` ``[c]`` this rank has."""
        if group.size() != self._ranks:
            # FSDP2's own shards after the forward pass: reshard_after_forward=<number>
            return cast("dist.Work | None", all_gather(output_tensor, input_tensor, group, async_op=async_op))
        if async_op and self._streams is not None:
            # On the stream of the computation, as FSDP2 asks for it here, nothing would overlap with that.
            stream = self._streams.unshard
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._gather(output_tensor, input_tensor)
                gathered = stream.record_event()
            # The one that waits may compute on another stream than the one that is current here.
            return PendingGather(lambda: torch.cuda.current_stream().wait_event(gathered))
        return self._gather(output_tensor, input_tensor)

    def _gather(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor) -> dist.Work | None:
        self.group.notice(fsdp2.versions(self.group))
        cells = output_tensor.view(-1, input_tensor.numel())
        cached = self.cached if self.cached is not None and self.cached.fits(cells) else None
        secondary = self.secondary if self.secondary is not None and self.secondary.fits(cells) else None
        travelling, levels, cached_after = self._begin(cells, input_tensor, cached, secondary)
        first = self._start(levels, 0, travelling)
        allocated_on = self._allocated_on

        def finish() -> None:
            wait = first
            for done in range(1, len(levels) + 1):
                wait()
                wait = self._start(levels, done, travelling)
                if done == cached_after and cached is not None:
                    cached.store(cells, self._rank, output_tensor, allocated_on)
            if secondary is not None and cached_after is not None:
                secondary.store(cells, self._rank, output_tensor, allocated_on)
            elif secondary is not None and secondary.bits is not None:
                for others in (slice(self._rank), slice(self._rank + 1, None)):
                    dequantize(travelling[others], cells.size(1), secondary.bits, cells[others])

        if self._streams is None:
            return PendingGather(finish)
        finish()
        return None

    def forget(self) -> None:
        """Drop what is cached: from now on every gather goes all the way."""
        self.cached = self.secondary = None

    def _begin(
        self,
        cells: torch.Tensor,
        cell: torch.Tensor,
        cached: CachedShard | None,
        secondary: CachedShard | None,
    ) -> tuple[torch.Tensor, Sequence[CommLevel], int | None]:
        """Start from what is cached, if it is up to date.

        Return the cells to gather, the axes that are left, and after how many of these to cache; None: not at all."""
        if secondary is not None and not secondary.consumed and not self.group.dirty:
            secondary.consumed = True
            return self._load(secondary, cells, cell), self._levels.secondary, None
        if secondary is not None:
            secondary.consumed = False
        if cached is not None and not self.group.dirty:
            return self._load(cached, cells, cell), self._levels.gather, None if secondary is None else 0
        self._traffic.misses += 1
        self.group.dirty = False
        if cached is not None or secondary is not None:
            self._staleness.filled(self.group, cell)
        return cells, [*self._levels.spread, *self._levels.gather], len(self._levels.spread)

    def _load(self, shard: CachedShard, cells: torch.Tensor, cell: torch.Tensor) -> torch.Tensor:
        """Copy a cached shard to its places in ``cells``; if it is quantized, in new cells of bytes. Return these."""
        self._traffic.hits += 1
        mine = cell
        allocated = self._allocated
        if shard.bits is not None:
            mine = quantize(cell, shard.bits)
            cells = mine.new_empty((cells.size(0), mine.numel()))
            cells[self._rank] = mine
            if self._streams is not None:
                allocated = torch.cuda.current_stream().record_event()
        block = self._rank // shard.block
        target = shard.of(cells, self._rank)
        if self._streams is None:
            self._staleness.check(self.group, mine, shard.cell(target, block))
        else:
            self._staleness.check(self.group, cell, None)
        shard.load(target, block, allocated)
        return cells

    def _start(self, levels: Sequence[CommLevel], number: int, cells: torch.Tensor) -> Wait:
        if number >= len(levels):
            return nothing
        # Rows [blocks, ranks of the axis, c]: ranks with this one's place on faster axes
        level = levels[number]
        stride = level.axis.stride
        return level.gather(cells.view(-1, level.size, stride, cells.size(1))[:, :, self._rank % stride])
