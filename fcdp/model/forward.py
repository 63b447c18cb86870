"""The forward pass of a cluster's model: each rank cuts its part of a batch into micro-batches and runs these."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from common.data import Documents, restarts
from common.data.rows import PADDING, take_rows
from common.errors import UserError
from common.models.attention.documents import padding_known
from common.models.attention.isolation import DocumentSeparator, takes_positions
from fcdp.model.model import ClusterModel
from fcdp.strategy.topology import Topology
from fuyou.model.loss.cross_entropy import targets_of
from fuyou.model.loss.router_loss import RouterPass

_FOR_THE_LOSS = {"targets", "labels", "counts", PADDING}  # what is not given to the model


class Forward:
    """Runs the model on this rank's part of each batch, ``micro_batch`` sequences (None: all of them) at once."""

    def __init__(self, model: ClusterModel, topology: Topology, micro_batch: int | None):
        self._model, self._topology, self._micro_batch = model, topology, micro_batch
        self._left_out = _FOR_THE_LOSS | (set() if takes_positions(model.meta) else {"position_ids"})
        self._separator: DocumentSeparator | None = None

    def micro_batches(self, rows: int) -> int:
        """Return how many micro-batches every rank computes of ``rows`` sequences."""
        most = math.ceil(rows / self._topology.world_size)
        return math.ceil(most / (self._micro_batch or most))

    def split(self, batch: Mapping[str, torch.Tensor]) -> tuple[list[dict[str, torch.Tensor]], int]:
        """Return this rank's micro-batches, as many as every rank has, and the number of labels of the whole batch.

        Each micro-batch is on the device and also has ``targets`` ``[rows, S]``, -100 where there is no label, and
        ``counts``, 1 for each token that is this rank's to count."""
        if restarts(batch.get("position_ids")):  # on all ranks alike, whichever of them has such rows
            self._model.family.check_documents(masked=False)
        targets = targets_of(batch["labels"], self._model.family.shifts_labels)
        return self._split({**batch, "targets": targets}), int((targets != -100).sum())

    def _split(self, batch: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
        rows, world, rank = batch["input_ids"].shape[0], self._topology.world_size, self._topology.rank
        if rows < world:
            raise UserError(f"--batch-size {rows} is less than one sequence for each of {world} ranks.")
        first, last = rows * rank // world, rows * (rank + 1) // world
        count = self.micro_batches(rows)
        width = math.ceil(math.ceil(rows / world) / count)
        parts = []
        for start in range(first, first + count * width, width):
            stop = min(start + width, last)
            if start < stop:
                part = take_rows(batch, start, stop)
                part["counts"] = torch.ones_like(part["targets"])
                if PADDING in part:
                    part["counts"].masked_fill_(part[PADDING], 0)
            else:  # this rank has a sequence less than others: one more, that teaches nothing
                part = take_rows(batch, 0, 1)
                part["targets"] = torch.full_like(part["targets"], -100)
                part["counts"] = torch.zeros_like(part["targets"])
            parts.append({name: self._to_device(value) for name, value in part.items()})
        return parts

    def _to_device(self, value: torch.Tensor) -> torch.Tensor:
        dtype = self._model.dtype if value.is_floating_point() else None
        return value.to(self._topology.device, dtype, non_blocking=True)

    def run(self, part: dict[str, torch.Tensor]) -> Any:
        """Return what the model gives for a micro-batch: ``logits``, and ``router_logits`` if they are requested."""
        inputs = {name: value for name, value in part.items() if name not in self._left_out}
        return self._model.module(**inputs, use_cache=False)

    def router_pass(self, parts: Sequence[dict[str, torch.Tensor]]) -> RouterPass | None:
        """Return the router loss of these micro-batches, to be given router logits; None if the loss has none."""
        loss = self._model.router_loss
        if loss is None:
            return None
        masks = []
        for part in parts:
            mask = part.get("attention_mask")
            masks.append(
                (part["counts"] if mask is None or mask.dim() != 2 else part["counts"] * mask).flatten().float()
            )
        return RouterPass(loss, masks)

    def combine(self, router: RouterPass) -> None:
        sums = torch.tensor(router.local_sums(), dtype=torch.float64, device=self._topology.device)
        dist.all_reduce(sums)
        router.combine([sums.tolist()])

    @contextlib.contextmanager
    def separate_documents(self, part: dict[str, torch.Tensor]) -> Iterator[None]:
        """Keep the documents of packed rows apart: around the backward pass, too, which runs blocks again."""
        documents = Documents.of(part.get("position_ids"))
        if documents is not None and self._separator is None:
            assert self._model.family.isolation is not None
            self._separator = DocumentSeparator(self._model.module, self._model.family.isolation)
        separated = contextlib.nullcontext() if self._separator is None else self._separator.apart(documents)
        with padding_known(part), separated:
            yield
