"""Reading whole parameters from the stores of a run at rest, and exporting them, record by record, in little memory."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from common.activity import advancing
from common.errors import UserError
from common.memory.buffers import HostBuffer
from common.models.checkpoint.writer import CheckpointWriter
from common.store import Store
from fuyou.layout.model_layout import ModelLayout
from fuyou.layout.record import Record
from fuyou.layout.record_parts import ParameterSlot
from fuyou.layout.record_sums import RecordSums
from fuyou.model.open_model import OpenModel
from fuyou.optimizer.moments import join
from fuyou.runtime.ranks import ClusterTopology, gather


class StoreReader:
    """Reads parameters from a store that nobody writes to, in the state of one slot, and checks them.

    Several ranks all read the same at once: each its part, the rest from the others.

    Args:
        slot: slot that holds the newest state of what is trained.
        topology: links to the other ranks, if there are any.
    """

    def __init__(
        self,
        store: Store,
        layout: ModelLayout,
        sums: RecordSums,
        chunk_elements: int,
        slot: int,
        topology: ClusterTopology | None,
    ):
        self._store = store
        self._layout = layout
        self._sums = sums
        self._chunk_elements = chunk_elements
        self._newest = slot
        self._intra_node = None if topology is None else topology.gather_groups.intra_node
        self._inter_node = None if topology is None else topology.gather_groups.inter_node

    def block_weights(self, records: Iterable[Record]) -> dict[str, torch.Tensor]:
        """Return the parameters of records that are used together, by first name, in the records' dtypes.

        Those that are in pieces are joined; others are views of one buffer per record.
        """
        values = (record.views(self._parameters(record)).values() for record in records)
        slots = (
            zip(record.parameters, each, strict=True) for record, each in zip(records, values, strict=True)
        )
        return dict(_joined(itertools.chain.from_iterable(slots)))

    def masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter's name and fp32 master weight (if frozen, its stored value).

        Takes memory for the master weights of one record. Collective: every rank must ask for all of them.
        """
        records = self._layout.records
        slots = (
            zip(each.parameters, each.views(self._masters(each)).values(), strict=True) for each in records
        )
        yield from _joined(itertools.chain.from_iterable(slots))

    def _parameters(self, record: Record) -> torch.Tensor:
        # On huge pages
        stored = HostBuffer(record.device_nbytes).tensor(torch.uint8, 0, record.device_nbytes)
        part = stored[record.first_byte : record.first_byte + record.parameter_nbytes]
        checked = self._sums.checked(record.index, "parameters", self._slot(record))
        self._store.read(checked, part.numpy()).result()
        _gather(stored, self._intra_node)  # the ranks of a node have all of it together
        if not record.decoded_nbytes:
            return stored.view(record.precision.dtype)
        values = torch.empty(record.numel, dtype=record.precision.dtype)
        record.decode(stored, values)
        return values

    def _masters(self, record: Record) -> torch.Tensor:
        """Return a record's master weights, fp32 ``[numel]``; if it is frozen, its values as they are."""
        share = record.share
        values = self._parameters(record)
        if not record.trainable or not record.precision.split:
            return values
        low = torch.empty(record.numel, dtype=record.precision.low_dtype)
        checked = self._sums.checked(record.index, "states", self._slot(record))
        first = share.owned_start(record.numel)
        stored = share.stored_start(record.numel)
        for chunk in record.chunks(self._chunk_elements):  # low comes first in its chunk
            part = low[first + chunk.start : first + chunk.stop].view(torch.uint8).numpy()
            self._store.read(checked, part, record.precision.state_nbytes(chunk.start), part.nbytes).result()
        _gather(low[stored : stored + record.stored].view(torch.uint8), self._inter_node)
        _gather(low.view(torch.uint8), self._intra_node)
        master = torch.empty(record.numel, dtype=torch.float32)
        join(values, low, master)
        return master

    def _slot(self, record: Record) -> int:
        return self._newest if record.trainable else 0


def _gather(data: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Fill in the parts of ``data``, ``uint8 [n]``, that the other ranks of the group have."""
    if group is not None:
        gather(data.view(group.size(), -1), group)


def _joined(parts: Iterable[tuple[ParameterSlot, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each parameter's first name and value, once all ranges of its experts have come, in order."""
    ranges: dict[str, list[torch.Tensor]] = {}
    for slot, value in parts:
        name = slot.names[0]
        if slot.experts is None:
            yield name, value
            continue
        ranges.setdefault(name, []).append(value)
        if slot.experts[1] == slot.all_experts:
            yield name, torch.cat(ranges.pop(name))


# Smallest and largest shard of an exported checkpoint, in bytes
_LEAST_SHARD = 32 << 20
_LARGEST_SHARD = 2_000_000_000


class StoreExporter:
    """Writes what has been trained.

    Args:
        model: the model, without weights.
        reader: reads the weights from the run's store.
        layout: the model's records, as this rank sees them.
        checkpoint: what training began with, whose tokenizer is copied; None if it was random.
        host_limit: bytes of host memory; two shards take a third.
        writes: whether this rank writes what the ranks of its node read together.
        allow_nonfinite: whether NaNs and infinities are written, too.
    """

    def __init__(
        self,
        model: OpenModel,
        reader: StoreReader,
        layout: ModelLayout,
        checkpoint: Path | None,
        host_limit: int,
        writes: bool = True,
        allow_nonfinite: bool = False,
    ):
        self._model = model
        self._reader = reader
        self._checkpoint = checkpoint
        self._layout = layout
        self._writes = writes
        self._allows_nonfinite = allow_nonfinite
        self._shard = max(_LEAST_SHARD, min(_LARGEST_SHARD, host_limit // 6))

    def checkpoint(self, directory: Path, dtype: torch.dtype) -> None:
        """Write a Hugging Face checkpoint in ``dtype`` that computes what the run does: adapters are merged, weights
        that it has rounded (to ``nf4`` or ``int8``) stay rounded, and what it has only read is copied in ``dtype``.

        Memory: two shards and, with adapters, one block in ``dtype`` and its adapters.

        Raises:
            NonFiniteWeights: a tensor holds a NaN or an infinity, and may not; on the rank that writes, when it has
                read all.
        """
        model = self._model
        source = self._model.source
        writer = None
        if self._writes:
            unties = model.adapters is not None and model.adapters.unties
            writer = CheckpointWriter(
                directory,
                model.base,
                model.config,
                dtype,
                self._shard,
                self._allows_nonfinite,
                source,
                unties,
            )
        used_together: dict[object, set[int]] = {}
        for visit in self._layout.visits(train=False):
            # Where embedding and head are tied, both use one record
            key = visit.record if visit.part is None else ("block", visit.layer)
            used_together.setdefault(key, set()).update(visit.records)
        for indices in advancing(used_together.values()):
            records = [self._layout.records[index] for index in sorted(indices)]
            if source is not None and not any(
                record.trainable or record.decoded_nbytes for record in records
            ):
                continue  # the checkpoint that training began with has it
            pieces = any(slot.experts is not None for record in records for slot in record.parameters)
            everything = model.adapters is not None or source is None or pieces
            values = self._values(
                [record for record in records if everything or record.trainable or record.decoded_nbytes]
            )
            if writer is None:
                continue
            if model.adapters is not None:
                values = model.adapters.merge(values)
            writer.add(values, copy=False)
        if writer is not None:
            writer.finish()

    def adapter(self, directory: Path, write: bool = True) -> None:
        """Write a PEFT adapter directory; without ``write``, adapters are only read. Memory: all adapters.

        Raises:
            UserError: the run trains none.
            NonFiniteWeights: see :meth:`checkpoint`.
        """
        adapters = self._model.adapters
        layout = self._layout
        if adapters is None:
            raise UserError("This run trains the weights themselves: there is no adapter to write.")
        values = self._values([layout.records[index] for index in layout.trainable])
        if not (self._writes and write):
            return
        adapters.save(directory, values, self._allows_nonfinite, self._checkpoint)

    def _values(self, records: Sequence[Record]) -> dict[str, torch.Tensor]:
        stack = self._model.stack
        return {
            name: value.to(stack.dtype_of(name))
            for name, value in self._reader.block_weights(records).items()
        }
