"""How a parameter group comes together: axis after axis, from what the rank itself keeps or from others.

FSDP2 hands over an output of one cell for each rank of OS's scope, this rank's already in place. The further apart
ranks are, the earlier they exchange, when least has come together (``[.., rank on the axis, .., cell]``):

1. *spread*, if the group is dirty: along the axes between P's scope and OS's. Then the rank has its column, the cells
   of all ranks with its place in P's blocks. Where P is sharded, and less finely than OS, that is its share of P, and
   it is kept (FCDP-Sched's cache, PaRO's P); until the next step, step 1 is a copy from there.
2. *gather*: along the axes inside P's scope. Nothing is left to do where P is not sharded; then FSDP2 keeps the
   parameters until they change.

Second shards (ZeRO++) are such a column, too, of blocks as large as their scope: kept when all has come together, used
once, in the backward pass, and forgotten.

The call is the same for forward, recomputation and backward, and FSDP2 issues it ahead of use. On CUDA everything is
enqueued in order and the host never waits. On the CPU the messages of the first axis are under way when the call
returns, and the rest is done when FSDP2 waits for the group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from common.point_to_point import Wait
from common.quantisation import Bits, dequantise, quantise, quantised_nbytes
from fcdp.cache.host_cache import CacheEntry, CopyStreams
from fcdp.cache.staleness import StalenessCheck
from fcdp.comms.rank_level import CommLevel, nothing
from fcdp.grouping import ParameterGroup
from fcdp.traffic import Traffic


class PendingGather(dist.Work):
    """The second half of a gather, done when FSDP2 waits."""

    def __init__(self, finish: Callable[[], None]):
        super().__init__()
        self._finish: Callable[[], None] | None = finish

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Finish. Idempotent."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True


@dataclass
class CachedShard:
    """What a rank keeps of a group: the cells of the ranks with its own place in blocks of ``block`` ranks."""

    block: int
    share: CacheEntry
    bits: Bits | None = None
    """Of second shards that are kept quantised, and travel so."""
    used_up: bool = True
    """Of second shards: the backward has used them, or no forward has filled them yet."""

    def of(self, cells: torch.Tensor, rank: int) -> torch.Tensor:
        """``[n, c]`` of ``cells`` ``[n * block, c]``."""
        return cells.view(-1, self.block, cells.size(1))[:, rank % self.block]

    def fits(self, cells: torch.Tensor) -> bool:
        """Whether the share has the size that parameters have now: what is trainable may change their dtype."""
        if self.bits is not None and not cells.is_floating_point():
            return False
        cell = cells.size(1) * cells.element_size() if self.bits is None else quantised_nbytes(cells.size(1), self.bits)
        return self.share.nbytes * self.block == cells.size(0) * cell

    def store(self, cells: torch.Tensor, rank: int, output: torch.Tensor) -> None:
        """Keep what of ``cells`` is to be kept. ``output`` is their memory."""
        column = self.of(cells, rank)
        if self.bits is not None:
            column = output = quantise(column, self.bits)
        self.share.store(column, output)


@dataclass(frozen=True)
class GatherLevels:
    """The axes of a gather, slowest first."""

    spread: Sequence[CommLevel]
    gather: Sequence[CommLevel]
    secondary: Sequence[CommLevel]


class StagedAllGather:
    """FSDP2's all-gather for one parameter group.

    Args:
        group: whose ``dirty`` mark decides whether what is kept may be used.
        rank: in the block of ranks over which FSDP2 shards.
        kept: this rank's share of P; None: it has none, or no room for it.
        second: this rank's second shard; None: there are none.
        streams: None on the CPU.
    """

    def __init__(
        self,
        group: ParameterGroup,
        rank: int,
        levels: GatherLevels,
        kept: CachedShard | None,
        secondary: CachedShard | None,
        streams: CopyStreams | None,
        net: StalenessCheck,
        traffic: Traffic,
    ):
        self.group = group
        self.kept = kept
        self.secondary = secondary
        self._rank = rank
        self._levels = levels
        self._streams = streams
        self._net = net
        self._traffic = traffic
        self._allocated: torch.cuda.Event | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for the output; from here on it may be written to on the current stream."""
        output = torch.empty(*size, dtype=dtype, device=device)
        if self._streams is not None:
            self._streams.release()
            self._allocated = torch.cuda.current_stream().record_event()
        return output

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill ``output_tensor`` ``[ranks * c]``, of which ``input_tensor`` ``[c]`` is this rank's part."""
        cells = output_tensor.view(-1, input_tensor.numel())
        kept = self.kept if self.kept is not None and self.kept.fits(cells) else None
        secondary = self.secondary if self.secondary is not None and self.secondary.fits(cells) else None
        travelling, levels, filled = self._begin(cells, input_tensor, kept, secondary)
        first = self._start(levels, 0, travelling)

        def rest() -> None:
            arriving = first
            for passed in range(1, len(levels) + 1):
                arriving()
                arriving = self._start(levels, passed, travelling)
                if passed == filled and kept is not None:
                    kept.store(cells, self._rank, output_tensor)
            if secondary is not None and filled is not None:
                secondary.store(cells, self._rank, output_tensor)
            elif secondary is not None and secondary.bits is not None:
                for others in (slice(self._rank), slice(self._rank + 1, None)):
                    cells[others] = dequantise(travelling[others], cells.size(1), secondary.bits)

        if self._streams is None:
            return PendingGather(rest)
        rest()
        return None

    def forget(self) -> None:
        """Let go of what is kept: from now on every gather goes all the way."""
        self.kept = self.secondary = None

    def _begin(
        self, cells: torch.Tensor, own: torch.Tensor, kept: CachedShard | None, secondary: CachedShard | None
    ) -> tuple[torch.Tensor, Sequence[CommLevel], int | None]:
        """Start from what is kept, if it is good. Returns the cells to gather, the axes that are left, and how many of
        them come before this rank's share of P is complete; None: nothing is to be kept of what comes."""
        if secondary is not None and not secondary.used_up and not self.group.dirty:
            secondary.used_up = True
            return self._load(secondary, cells, own), self._levels.secondary, None
        if secondary is not None:
            secondary.used_up = False
        if kept is not None and not self.group.dirty:
            return self._load(kept, cells, own), self._levels.gather, None if secondary is None else 0
        self._traffic.misses += 1
        self.group.dirty = False
        if kept is not None or secondary is not None:
            self._net.filled(self.group, own)
        return cells, [*self._levels.spread, *self._levels.gather], len(self._levels.spread)

    def _load(self, column: CachedShard, cells: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """What is kept, in its places: in ``cells``, or, if it is quantised, in cells of bytes."""
        self._traffic.hits += 1
        mine, allocated = own, self._allocated
        if column.bits is not None:
            mine = quantise(own, column.bits)
            cells = mine.new_empty((cells.size(0), mine.numel()))
            cells[self._rank] = mine
            if self._streams is not None:
                allocated = torch.cuda.current_stream().record_event()
        place, target = self._rank // column.block, column.of(cells, self._rank)
        if self._streams is None:
            self._net.check(self.group, mine, column.share.cell(target, place))
        else:
            self._net.check(self.group, own, None)
        column.share.load(target, place, allocated)
        return cells

    def _start(self, levels: Sequence[CommLevel], number: int, cells: torch.Tensor) -> Wait:
        """Gather along one axis, if there is one: what travels is ``[blocks, ranks of the axis, c]``, of the ranks with
        this one's place."""
        if number >= len(levels):
            return nothing
        level = levels[number]
        stride = level.axis.stride
        return level.gather(cells.view(-1, level.size, stride, cells.size(1))[:, :, self._rank % stride])
