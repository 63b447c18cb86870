"""Exporting what was trained: as a checkpoint, an adapter, or both merged; record by record, in little memory."""

from collections.abc import Sequence
from pathlib import Path

import torch

from common.errors import UserError
from common.models.checkpoint.export import CheckpointWriter
from fuyou.checkpoint.reader import StoreReader
from fuyou.layout.model_layout import ModelLayout
from fuyou.layout.record import Record
from fuyou.model.open_model import OpenModel

_LEAST_SHARD, _LARGEST_SHARD = 32 << 20, 5_000_000_000  # Smallest and largest shard of an exported checkpoint, in bytes


class StoreExporter:
    """Writes what has been trained.

    Args:
        model: the model, without weights.
        reader: reads the weights from the run's store.
        shape: the model's records, as this rank sees them.
        checkpoint: what training began with, whose tokenizer is copied; None if it was random.
        host_limit: bytes of host memory; a shard takes a third.
        writes: whether this rank writes what the ranks of its node read together.
        allow_nonfinite: whether NaNs and infinities are written, too.
    """

    def __init__(
        self,
        model: OpenModel,
        reader: StoreReader,
        shape: ModelLayout,
        checkpoint: Path | None,
        host_limit: int,
        writes: bool = True,
        allow_nonfinite: bool = False,
    ):
        self._model, self._reader, self._checkpoint = model, reader, checkpoint
        self._shape, self._writes, self._allows_nonfinite = shape, writes, allow_nonfinite
        self._shard = max(_LEAST_SHARD, min(_LARGEST_SHARD, host_limit // 3))

    def checkpoint(self, directory: Path, dtype: torch.dtype) -> None:
        """Write a Hugging Face checkpoint in ``dtype`` that computes what the run does: adapters are merged, weights
        that it has rounded (to ``nf4`` or ``int8``) stay rounded, and what it has only read is copied in ``dtype``.

        Memory: a shard and, with adapters, one block in ``dtype`` and its adapters.

        Raises:
            NonFiniteWeights: a tensor holds a NaN or an infinity, and may not; on the rank that writes, when it has
                read all.
        """
        model, source, writer = self._model, self._model.source, None
        if self._writes:
            unties = model.adapters is not None and model.adapters.unties
            writer = CheckpointWriter(
                directory, model.base, model.config, dtype, self._shard, self._allows_nonfinite, source, unties
            )
        used_together: dict[object, set[int]] = {}
        for visit in self._shape.visits(train=False):  # where embedding and head are tied, both use one record
            key = visit.record if visit.part is None else ("block", visit.layer)
            used_together.setdefault(key, set()).update(visit.records)
        for indices in used_together.values():
            records = [self._shape.records[index] for index in sorted(indices)]
            if source is not None and not any(record.trainable or record.decoded_nbytes for record in records):
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
            writer.add(values)
        if writer is None:
            return
        writer.finish()

    def adapter(self, directory: Path, write: bool = True) -> None:
        """Write a PEFT adapter directory; without ``write``, adapters are only read. Memory: all adapters.

        Raises:
            UserError: the run trains none.
            NonFiniteWeights: see :meth:`checkpoint`.
        """
        adapters, shape = self._model.adapters, self._shape
        if adapters is None:
            raise UserError("This run trains the weights themselves: there is no adapter to write.")
        values = self._values([shape.records[index] for index in shape.trainable])
        if not (self._writes and write):
            return
        adapters.save(directory, values, self._allows_nonfinite, self._checkpoint)

    def _values(self, records: Sequence[Record]) -> dict[str, torch.Tensor]:
        """Return the parameters of records by first name, in the dtypes that the model computes in."""
        stack = self._model.stack
        return {name: value.to(stack.dtype_of(name)) for name, value in self._reader.block_weights(records).items()}
