"""Whole parameters out of the stores of all ranks: each reads what it has, the rest comes from the others."""

from collections.abc import Iterator

import torch

from fuyou.checkpoint.store_access import StoreReader
from fuyou.layout.record import Record
from fuyou.optimizer.split_weights import join
from fuyou.ranks.collectives import gather
from fuyou.ranks.topology import ClusterTopology


class ClusterReader(StoreReader):
    """A :class:`fuyou.checkpoint.store_access.StoreReader` for several ranks, which all read the same at once.

    Memory: one record; its masters as well, where those are asked for.
    """

    def __init__(self, topology: ClusterTopology, *arguments: object):
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._topology = topology

    def masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As there, each record's when it is asked for: ask on every rank."""
        for record in self._shape.records:
            yield from record.views(self._record_masters(record)).items()

    def _kept(self, record: Record) -> torch.Tensor:
        """As there. Nodes do not need each other for this."""
        kept = super()._kept(record)
        self._gather_intra_node(kept)
        return kept

    def _record_masters(self, record: Record) -> torch.Tensor:
        """fp32 ``[numel]``; what is frozen as it is."""
        share, width = record.share, record.precision.state_bytes
        values = self._parameters(record)
        if not record.trainable or not record.precision.split:
            return values
        low = torch.empty(record.numel, dtype=torch.int16)
        place = self._extents[record.index].states[self._slot(record)]
        first = share.owned_start(record.numel)
        for chunk in record.chunks(self._chunk_elements):  # lo comes first in its chunk
            part = low[first + chunk.start : first + chunk.stop].view(torch.uint8).numpy()
            self._store.read_now(place, part, chunk.start * width, part.nbytes)
        stored = share.stored_start(record.numel)
        inter_node = self._topology.gather_groups.inter_node
        if inter_node is not None:
            cells = low[stored : stored + record.stored].view(torch.uint8)
            gather(cells.view(inter_node.size(), -1), inter_node)
        self._gather_intra_node(low.view(torch.uint8))
        master = torch.empty(record.numel, dtype=torch.float32)
        join(values, low, master)
        return master

    def _gather_intra_node(self, data: torch.Tensor) -> None:
        """Fill in what the other ranks of this node have of ``data``, ``uint8 [n]``."""
        intra_node = self._topology.gather_groups.intra_node
        if intra_node is not None:
            gather(data.view(intra_node.size(), -1), intra_node)
