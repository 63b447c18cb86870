"""A plain loop in memory on the device itself, which the engine has to equal bit for bit.

The model computes on the device; masters, moments and updates are on the CPU, as they are in the engine. What
:class:`families.twin.Twin` lacks for equality to the bit is added: tied weights whose head and embedding gradients are
summed one after the other, clipping, and attention in a loop over the documents of packed rows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from common.hardware import kernels_of
from families.twin import Twin

BY_DOCUMENT = "plain_loop_by_document"


class DeviceTwin(Twin):
    """AdamW on a checkpoint, on a device.

    Args:
        checkpoint: its directory.
        dtype: of computing.
        device: where the model computes.
        max_grad_norm: global norm to which gradients are clipped; None if they are not clipped.
        options: ``lr``, ``weight_decay``, ``eps``.
    """

    def __init__(
        self,
        checkpoint: Path,
        dtype: torch.dtype,
        device: str,
        max_grad_norm: float | None,
        options: dict[str, float],
    ):
        exact = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        masters = {name: value.detach().clone() for name, value in exact.named_parameters()}
        model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)
        model.to(device)
        self._device, self._max_grad_norm = torch.device(device), max_grad_norm
        self.grad_norm = 0.0
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        self._embedding = next(name for name, value in model.named_parameters() if value is embedding.weight)
        self._tied_head: nn.Parameter | None = None
        if head.weight is embedding.weight:  # a separate parameter, so that its gradient can be told apart
            head.weight = self._tied_head = nn.Parameter(head.weight.detach().clone())
        super().__init__(model, masters, options)

    def step(self, batch: dict[str, torch.Tensor], micro: int, documents: list[slice] | None = None) -> float:
        """Take one step; documents are where positions begin at 0. Returns the loss."""
        assert documents is None
        items = (batch["labels"][:, 1:] != -100).sum()
        losses, terms, of_head = [], dict[str, list[torch.Tensor]](), list[torch.Tensor]()
        for start in range(0, len(batch["labels"]), micro):
            part = {name: value[start : start + micro].to(self._device) for name, value in batch.items()}
            with documents_alone(self.model, part):
                loss = self.model(**part, num_items_in_batch=items, use_cache=False).loss
            loss.backward()
            losses.append(loss.detach())
            for name, parameter in self._parameters.items():
                if parameter.grad is not None:
                    terms.setdefault(name, []).append(parameter.grad)
                    parameter.grad = None
            if self._tied_head is not None and self._tied_head.grad is not None:
                of_head.append(self._tied_head.grad)
                self._tied_head.grad = None
        terms[self._embedding] = of_head + terms[self._embedding]
        gradients = {name: self._sum(name, each) for name, each in terms.items()}
        self.grad_norm = float(
            sum(gradient.double().square().sum() for gradient in gradients.values()) ** 0.5
        )
        clips = self._max_grad_norm is not None and self.grad_norm > self._max_grad_norm
        self._apply(gradients, (self._max_grad_norm or 0.0) / (self.grad_norm + 1e-6) if clips else 1.0)
        return float(sum(losses))

    @torch.no_grad()
    def _load(self) -> None:
        super()._load()
        if self._tied_head is not None:
            self._tied_head.copy_(self._parameters[self._embedding])


@contextmanager
def documents_alone(model: nn.Module, batch: dict[str, torch.Tensor]) -> Iterator[None]:
    """Let ``model`` attend within the documents of ``batch``, in which positions begin at 0 with each."""
    if "position_ids" not in batch:
        yield
        return
    for module in model.modules():
        vars(module)["documents"] = batch["position_ids"].tolist()
    config: Any = model.config
    before, config._attn_implementation = config._attn_implementation, BY_DOCUMENT
    try:
        yield
    finally:
        config._attn_implementation = before


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Attend in a loop over documents, each as if it were alone; ``[B, H, S, D]`` to ``[B, S, H, D]``."""
    window, rows = options.get("sliding_window"), []
    for row, positions in enumerate(module.documents):
        starts = [index for index, position in enumerate(positions) if position == 0] + [len(positions)]
        pieces = []
        for start, end in pairwise(starts):
            q, k, v = (each[row : row + 1, :, start:end] for each in (query, key, value))
            if query.dtype == torch.bfloat16 and query.device.type == "cpu":
                # Zeros behind, which nothing sees
                q, k, v = (nn.functional.pad(each, (0, 0, 0, -each.shape[2] % 32)) for each in (q, k, v))
            mask = None
            if window and end - start > window:
                token = torch.arange(q.shape[2], device=query.device)
                mask = (token <= token[:, None]) & (token > token[:, None] - window)
            if kernels_of(query.device) != "cpu" and (mask is not None or q.dtype == torch.float32):
                # Flash attention takes neither; with shared heads, only the math kernel would be left.
                k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
            attended = nn.functional.scaled_dot_product_attention(
                q, k, v, mask, options.get("dropout", 0.0), mask is None, scale=options.get("scaling"),
                enable_gqa=k.shape[1] != q.shape[1],
            )  # fmt: skip
            pieces.append(attended[:, :, : end - start].transpose(1, 2))
        rows.append(torch.cat(pieces, 1))
    return torch.cat(rows), None


ALL_ATTENTION_FUNCTIONS.register(BY_DOCUMENT, _attend)
