"""FCDP-Sched: how a parameter group comes together, first across nodes, later from the cache.

FSDP2 hands over an output of W cells, this rank's already in place. Seen as ``[N, M, c]`` (node, place in node, cell):

* *miss* (the group is dirty): ranks in the same place exchange across nodes, so that ``output[:, m]`` is filled: this
  rank's share. It is cached, asynchronously, while ``output[n]`` is gathered inside the node for every n.
* *hit*: ``output[:, m]`` comes from the cache, then the same gathers inside the node. Nothing crosses nodes.

The call is the same for forward, recomputation and backward, and FSDP2 issues it ahead of use. On CUDA everything is
enqueued in order and the host never waits. On the CPU messages are under way when the call returns, and the rest is
done when FSDP2 waits for the group.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from fcdp.grouping import ParameterGroup
from fcdp.host_cache import CopyStreams, Share
from fcdp.rank_level import RankLevel
from fcdp.staleness import Net
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


class CachedAllGather:
    """FSDP2's all-gather for one parameter group, by way of the cache.

    Args:
        group: whose ``dirty`` mark decides between hit and miss.
        inside, across: the two levels.
        share: this rank's place in the cache; None: no room was left in the host, so every gather is a miss.
        streams: None on the CPU.
    """

    def __init__(
        self,
        group: ParameterGroup,
        inside: RankLevel,
        across: RankLevel,
        share: Share | None,
        streams: CopyStreams | None,
        net: Net,
        traffic: Traffic,
    ):
        self.group = group
        self.share = share
        self._inside = inside
        self._across = across
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
        """Fill ``output_tensor`` ``[W * c]``, of which ``input_tensor`` ``[c]`` is this rank's part."""
        nodes, ranks, own = self._across.size, self._inside.size, self._across.index
        cells = output_tensor.view(nodes, ranks, -1)
        column = cells[:, self._inside.index]
        share = self.share if self.share is not None and self.share.nbytes == _nbytes(column) else None
        if share is not None and not self.group.dirty:
            self._traffic.hits += 1
            cached = share.cell(column, own) if self._streams is None else None
            self._net.check(self.group, input_tensor, cached)
            share.load(column, own, self._allocated)
            return self._pending(self._inside.gather(cells))

        self._traffic.misses += 1
        misses = self._traffic.misses_by_group
        misses[self.group.name] = misses.get(self.group.name, 0) + 1
        self.group.dirty = False
        arrived = self._across.gather(column.unsqueeze(0))
        if share is not None:
            self._net.filled(self.group, input_tensor)

        def rest() -> None:
            arrived()
            filled = self._inside.gather(cells)
            if share is not None:
                share.store(column, output_tensor)
            filled()

        return self._pending(rest)

    def _pending(self, finish: Callable[[], None]) -> dist.Work | None:
        """On CUDA enqueue the rest now, in order; on the CPU leave it for when FSDP2 waits."""
        if self._streams is None:
            return PendingGather(finish)
        finish()
        return None


def _nbytes(data: torch.Tensor) -> int:
    return data.numel() * data.element_size()
