"""A batch that has been checked: what a step reads of it, on the CPU."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from common.data.documents import Documents, restarts
from common.data.rows import PADDING, BatchValue, holds_images, take_rows
from common.errors import UserError
from common.models.task_type import TaskType
from fuyou.model.chunk_survey import chunk_survey
from fuyou.model.loss.cross_entropy import IGNORED, targets_of
from fuyou.model.open_model import OpenModel, positions_in
from fuyou.model.streamed_model import CHUNK_PLACE, HOST_POSITIONS, StreamedModel

# Arguments of transformers' models that trainers pass, with the values that change nothing here
_WITHOUT_EFFECT: dict[str, tuple[object, ...]] = {
    "use_cache": (True, False),
    "return_dict": (True, False),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "output_router_logits": (False,),
    "logits_to_keep": (0,),
}


@dataclass(frozen=True)
class TrainingBatch:
    """A batch that can be trained on; every tensor is on the CPU."""

    inputs: Mapping[str, BatchValue]
    """``input_ids`` int64 ``[B, S]``, and all else that the model's forward takes of it, except labels."""
    targets: torch.Tensor
    """What each position is to predict, int64 ``[B, S]``, -100 where no loss is wanted; of a sequence classifier
    ``[B, 1]``."""
    label_count: int  # Number of targets that are not -100
    images: bool  # Whether it has values of images
    padded: bool  # Whether attention is given a mask of all pairs of tokens

    @classmethod
    def of(cls, model: OpenModel, given: Mapping[str, Any], *, engine_loss: bool = True) -> "TrainingBatch":
        """Check a batch and return it.

        Args:
            given: ``input_ids``, ``labels`` and the rest, as the caller passes them.
            engine_loss: whether the engine computes the loss. If the caller does, missing labels are the batch's own
                tokens, except padding, and class 0 of a sequence classifier.

        Raises:
            UserError: it cannot be trained on.
        """
        inputs = {name: value for name, value in given.items() if value is not None}
        items = inputs.pop("num_items_in_batch", None)
        if "shift_labels" in inputs:
            raise UserError(
                "shift_labels: the engine shifts labels itself. Give it labels, one for each token."
            )
        without_effect = [
            name
            for name, value in inputs.items()
            if isinstance(value, int) and value in _WITHOUT_EFFECT.get(name, ())
        ]
        inputs = {name: _on_cpu(name, value) for name, value in inputs.items() if name not in without_effect}
        ids = inputs["input_ids"] = _integers("input_ids", inputs.get("input_ids"), 2)
        labels = inputs.pop("labels", None)
        if engine_loss and not model.task_type.generates and model.config.num_labels == 1:
            raise UserError(
                "This model gives a single number for each row, which cross entropy cannot learn from: make a loss of "
                'engine.tokens(outputs=("logits",)).'
            )
        if labels is None and not engine_loss:
            labels = _own_labels(model, inputs, ids)
        embedding = model.stack.model.get_input_embeddings()
        if type(embedding) is nn.Embedding and not holds_images(inputs):  # whose tokens stand for images
            advice = ": use the tokenizer that belongs to it"
            _check_range("input_ids holds", ids, embedding.num_embeddings, "this model's tokens", advice)
        _check_positions(model, inputs, ids)
        targets = _targets(model, labels, ids)
        count = int((targets != IGNORED).sum())
        if items is not None and items != count:
            raise UserError(
                f"num_items_in_batch is {int(items)}, and the loss is the mean over the {count} labels of this batch: "
                "leave it out, or make a loss of engine.tokens()."
            )
        return cls(inputs, targets, count, holds_images(inputs), _makes_mask(model, inputs))

    @property
    def ids(self) -> torch.Tensor:
        """The tokens, int64 ``[B, S]``."""
        ids = self.inputs["input_ids"]
        assert isinstance(ids, torch.Tensor)
        return ids

    @property
    def size(self) -> tuple[int, int]:
        """Sequences, and tokens of each."""
        rows, length = self.ids.shape
        return rows, length

    def chunks(self, chunk: int, device: torch.device, stack: StreamedModel) -> list[dict[str, torch.Tensor]]:
        """Return the batch on ``device``, ``chunk`` tokens of one row at a time, with ``targets``.

        Raises:
            UserError: it has more than rows of tokens, which passes in whole rows only, as all of some families does.
        """
        survey = chunk_survey(stack)  # settles how the model attends to earlier chunks, too
        if not survey.keys:
            raise UserError(
                f"Rows do not pass through {type(stack.model).__name__} in chunks: leave --chunk out."
            )
        mask = self.inputs.get("attention_mask")
        positions = self.inputs.get("position_ids")
        others = set(self.inputs) - {"input_ids", "attention_mask", "position_ids", PADDING}
        what = next(iter(sorted(others)), None)
        if isinstance(mask, torch.Tensor) and not (mask.dim() == 2 and bool(mask.all())):
            what = "an attention_mask that hides tokens"
        flat = positions if isinstance(positions, torch.Tensor) and positions.dim() == 2 else None
        documents = Documents.of(flat)
        if positions is not flat or not (documents is None or survey.separates):
            what = "position_ids of several documents in a row"
        if self.targets.shape != self.ids.shape:
            what = "one label for each"
        rows, length = self.size
        if what is not None:
            raise UserError(
                f"Rows of {length:,} tokens pass in chunks of {chunk:,}, which cannot have {what}."
            )
        values = {"input_ids": self.ids, "targets": self.targets}
        if flat is not None:  # otherwise the family counts them, some of them from another number
            values["position_ids"] = flat
        if isinstance(padding := self.inputs.get(PADDING), torch.Tensor):
            values[PADDING] = padding
        starts = [*range(0, length, chunk), length]
        if length % chunk == 1:  # for one token, families compute another way, which changes states in place
            starts[-2] -= 1
        spans = [] if documents is None else list(documents.spans())

        def place(row: int, start: int, stop: int) -> list[int]:
            touched = [span[1:] for span in spans if span[0] == row and span[2] > start and span[1] < stop]
            return [start, length, *(first for first, _ in touched), *(end for _, end in touched[-1:])]

        return [
            {name: value[row : row + 1, start:stop].to(device) for name, value in values.items()}
            | {CHUNK_PLACE: torch.tensor(place(row, start, stop))}
            for row in range(rows)
            for start, stop in itertools.pairwise(starts)
        ]

    def micro_batches(
        self, rows: int, device: torch.device, dtype: torch.dtype
    ) -> list[dict[str, torch.Tensor]]:
        """Return the batch on ``device``, ``rows`` sequences at a time, with ``targets``.

        Raises:
            UserError: a value cannot be divided among the sequences.
        """
        result = []
        for start in range(0, self.size[0], rows):
            taken = take_rows(self.inputs, start, start + rows)
            micro = {
                name: value.to(device, dtype if value.is_floating_point() else None, non_blocking=True)
                for name, value in taken.items()
            }
            if "position_ids" in taken:
                micro[HOST_POSITIONS] = taken["position_ids"]
            micro["targets"] = self.targets[start : start + rows].to(device, non_blocking=True)
            result.append(micro)
        return result


def _on_cpu(name: str, value: Any) -> BatchValue:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, Sequence) and all(
        entry is None or isinstance(entry, torch.Tensor) for entry in value
    ):
        return [None if entry is None else entry.detach().cpu() for entry in value]
    raise UserError(
        f"{name} is {_described(value)}: the engine takes tensors, and lists of them with one entry for each sequence."
    )


def _described(value: Any) -> str:
    if value is None:
        return "missing"
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)}".removeprefix("torch.")
    return repr(value) if isinstance(value, bool | int | float | str) else f"a {type(value).__name__}"


def _integers(name: str, value: BatchValue | None, dims: int) -> torch.Tensor:
    shape = "[sequences, tokens]" if dims == 2 else "[sequences], one class each"
    good = isinstance(value, torch.Tensor) and value.dim() == dims
    if not good or value.is_floating_point() or value.is_complex() or value.dtype is torch.bool:  # type: ignore[union-attr]
        raise UserError(f"A batch needs {name}, a tensor of integers {shape}: it is {_described(value)}.")
    return value.long()  # type: ignore[union-attr]


def _own_labels(model: OpenModel, inputs: Mapping[str, BatchValue], ids: torch.Tensor) -> torch.Tensor:
    if model.task_type is TaskType.SEQUENCE_CLASSIFICATION:
        return ids.new_zeros(ids.shape[0])
    mask = inputs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
        return ids.masked_fill(mask.eq(0), IGNORED)
    return ids


def _targets(model: OpenModel, given: BatchValue | None, ids: torch.Tensor) -> torch.Tensor:
    per_row = model.task_type is TaskType.SEQUENCE_CLASSIFICATION
    labels = _integers("labels", given, 1 if per_row else 2)
    if labels.shape != ids.shape[: labels.dim()]:
        raise UserError(
            f"labels are {list(labels.shape)} and input_ids {list(ids.shape)}: each needs its own label."
        )
    targets = targets_of(labels, model.stack.family.shifts_labels)
    generates = model.task_type.generates
    outcomes = model.config.get_text_config().vocab_size if generates else model.config.num_labels
    assert isinstance(outcomes, int)
    kind = "tokens" if generates else "classes"
    _check_range("labels hold", targets[targets != IGNORED], outcomes, f"this model's {kind}")
    return targets


def _check_range(held: str, values: torch.Tensor, count: float, whose: str, advice: str = "") -> None:
    """Refuse what an embedding or a loss would fail on: on a GPU that ends the process."""
    if values.numel():
        least, most = (int(value) for value in values.aminmax())
        if least < 0 or most >= count:
            wrong = least if least < 0 else most
            raise UserError(
                f"{held} {wrong}, and {whose} are 0 to {count - 1}{advice}. The batch changed nothing."
            )


def _check_positions(model: OpenModel, inputs: Mapping[str, BatchValue], ids: torch.Tensor) -> None:
    """Refuse positions and masks of other shapes, positions that a learned table does not have, and documents of a row
    that would see each other."""
    for name in ("position_ids", "attention_mask"):
        value = inputs.get(name)
        shapes = {tuple(ids.shape)}
        if isinstance(value, torch.Tensor):
            axes = [-2, -1] if name == "position_ids" else [0, -1]
            shapes |= {tuple(value.shape[axis] for axis in axes)} if value.dim() > 2 else {tuple(value.shape)}
        if value is not None and (not isinstance(value, torch.Tensor) or len(shapes) > 1 or value.dim() < 2):
            raise UserError(
                f"{name} is {_described(value)}, and input_ids are {list(ids.shape)}: they do not match."
            )
    positions = inputs.get("position_ids")
    mask = inputs.get("attention_mask")
    if isinstance(positions, torch.Tensor):
        _check_range("position_ids hold", positions, _learned_positions(model), "this model's positions")
        if restarts(positions):
            model.stack.family.check_documents(masked=isinstance(mask, torch.Tensor) and mask.dim() == 2)
    elif ids.shape[1] > (most := _learned_positions(model, skipped=True)):
        raise UserError(
            f"input_ids are {list(ids.shape)}, and this model has learned {most} positions: cut the rows."
        )


def _learned_positions(model: OpenModel, skipped: bool = False) -> float:
    """Return the number of positions in the model's learned table, infinity if it has none; with ``skipped`` without
    the first ones, which some families pass over when they count positions themselves."""
    table = model.learned_positions
    if table is None:
        return math.inf
    count = positions_in(table)
    return count if table.padding_idx is None or not skipped else count - table.padding_idx - 1


def _makes_mask(model: OpenModel, inputs: Mapping[str, BatchValue]) -> bool:
    """Return whether attention is given a mask of all pairs of tokens: because one of padding hides some, or because
    positions restart in a family that keeps documents apart with a mask."""
    mask = inputs.get("attention_mask")
    if isinstance(mask, torch.Tensor):
        return mask.dim() > 2 or not bool(mask.all())
    positions = inputs.get("position_ids")
    packed = isinstance(positions, torch.Tensor) and restarts(positions)
    isolation = model.stack.family.isolation if packed else None
    return isolation is not None and not isolation.attention_by_document
