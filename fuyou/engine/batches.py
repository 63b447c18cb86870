"""Batches on their way in: what they must have, and whether the buffers hold them."""

from typing import Any

import torch

from common.data import restarts
from common.data.rows import holds_images
from common.errors import FinetuneError, UserError
from common.models.task_type import TaskType
from fuyou.engine.opening import OpenRun
from fuyou.model.loss.cross_entropy import IGNORED, targets_of
from fuyou.schedule.batch import ENGINE_LOSS, LossInputs


def check_batch(run: OpenRun, batch: dict[str, Any]) -> int:
    """See that a batch can be trained on; return the number of labels in the batches of all ranks.

    Raises:
        UserError: it cannot.
    """
    if run.closed:
        raise FinetuneError("The engine has been closed.")
    family = run.model.stack.family
    per_row = run.model.task_type is TaskType.SEQUENCE_CLASSIFICATION
    for name, dims in (("input_ids", 2), ("labels", 1 if per_row else 2)):
        if batch.get(name) is None or batch[name].dim() != dims or batch[name].is_floating_point():
            shape = "[sequences, tokens]" if dims == 2 else "[sequences], one class each"
            raise UserError(f"A batch needs {name}, int64 of shape {shape}.")
    _check_ids(run, batch)
    if restarts(batch.get("position_ids")):
        mask = batch.get("attention_mask")
        family.check_documents(masked=mask is not None and mask.dim() == 2)
    labels = int((targets_of(batch["labels"], family.shifts_labels) != -100).sum())
    labels = sum(run.agreement.all_gather_object(labels))
    if not labels:
        raise UserError("No token of this batch has a label (all are -100): there is nothing to learn from it.")
    return labels


def _check_ids(run: OpenRun, batch: dict[str, Any]) -> None:
    """Refuse tokens that the model's embedding does not have, before a step begins that they would break.

    Raises:
        UserError: there is one.
    """
    embedding, ids = run.model.stack.model.get_input_embeddings(), batch["input_ids"]
    if type(embedding) is not torch.nn.Embedding or holds_images(batch) or not ids.numel():
        return
    least, most = int(ids.min()), int(ids.max())
    if least < 0 or most >= embedding.num_embeddings:
        wrong = least if least < 0 else most
        raise UserError(
            f"input_ids holds {wrong}, and this model's tokens are 0 to {embedding.num_embeddings - 1}: use the "
            "tokenizer that belongs to it. The engine is as it was before this batch."
        )


def with_labels(run: OpenRun, batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch whose labels are its own tokens, but for padding, if it has none; classes are 0."""
    ids = batch.get("input_ids")
    if batch.get("labels") is not None or not isinstance(ids, torch.Tensor):
        return batch
    if run.model.task_type is TaskType.SEQUENCE_CLASSIFICATION:
        return {**batch, "labels": torch.zeros(ids.shape[0], dtype=torch.int64)}
    mask = batch.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
        ids = ids.masked_fill(mask.eq(0), IGNORED)
    return {**batch, "labels": ids}


def largest_of_all(
    run: OpenRun, batch: dict[str, Any], loss: LossInputs = ENGINE_LOSS
) -> tuple[int, int, bool, bool, LossInputs]:
    """Return the largest batch of all ranks: sequences, tokens per sequence, whether any has images, whether a mask of
    any hides tokens, and what any computes its loss from.

    All or none of the ranks make their buffers anew.
    """
    rows, seq_len = batch["input_ids"].shape
    size = (rows, seq_len, holds_images(batch), _makes_mask(run, batch), loss.outputs, loss.reference)
    of_all = run.agreement.all_gather_object(size)
    rows, seq_len, images, padded, outputs, reference = (max(sizes) for sizes in zip(*of_all, strict=True))
    return rows, seq_len, images, padded, LossInputs(outputs, reference)


def _makes_mask(run: OpenRun, batch: dict[str, Any]) -> bool:
    """Return whether attention is given a mask of all pairs of tokens: because one of padding hides some, or because
    positions restart in a family that keeps documents apart with a mask."""
    mask = batch.get("attention_mask")
    if isinstance(mask, torch.Tensor):
        return mask.dim() > 2 or not bool(mask.all())
    isolation = run.model.stack.family.isolation if restarts(batch.get("position_ids")) else None
    return isolation is not None and not isolation.attention_by_document
