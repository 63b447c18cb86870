"""What :meth:`fuyou.Engine.tokens` returns: numbers for each token that a loss of any kind is made of."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from common.errors import FinetuneError, UserError
from common.models.task_type import TaskType
from fuyou.model.loss.token_head import HeadFunction, TokenHead
from fuyou.model.open_model import OpenModel, check_reference
from fuyou.model.training_batch import TrainingBatch
from fuyou.runtime.compute.token_computation import TokenPass

AUX_LOSS = "aux_loss"


class TokenOutput:
    """Numbers for each token, as attributes and by name: ``out.log_probs`` is ``out["log_probs"]``.

    All are on the batch's device, where a loss is made of them, in fp32 (or what is not a floating-point number),
    ``[B, S]`` with position t for the prediction of token t + 1; of a sequence classifier ``[B]`` and more. While
    gradients are enabled they are leaves as far as the caller is concerned: ``backward()`` on a loss made of them
    streams the blocks in reverse.

    Attributes:
        mask: bool, like log-probabilities: which positions have a target (a label that is not -100).
        reference: the same of the model without its adapters, without gradients, if that was requested; else None.
        aux_loss: router loss of the whole batch of all ranks before its coefficient, an fp32 scalar with a gradient; to
            be added to the loss by the caller. None if the model has none, or there are no gradients.
        aux_coefficient: the coefficient that the model's configuration has for it, or 0.
    """

    aux_coefficient = 0.0

    def __init__(
        self, values: Mapping[str, torch.Tensor], mask: torch.Tensor, aux_loss: torch.Tensor | None = None
    ):
        self._values = dict(values)
        self.mask = mask
        self.aux_loss = aux_loss
        self.reference: TokenOutput | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._values[name]

    def __getattr__(self, name: str) -> torch.Tensor:
        if name.startswith("_") or name not in self._values:
            known = ", ".join(self.__dict__.get("_values", ()))
            raise AttributeError(
                f"tokens() was called for {known}, and not for {name!r}: name it in outputs="
            )
        return self._values[name]

    def keys(self) -> list[str]:
        """Return the names of all outputs."""
        return list(self._values)

    def to(self, device: torch.device) -> "TokenOutput":
        """Return the same on a device; autograd takes gradients back to where the values are made."""
        aux_loss = None if self.aux_loss is None else self.aux_loss.to(device)
        values = {name: value.to(device) for name, value in self._values.items()}
        result = TokenOutput(values, self.mask.to(device), aux_loss)
        result.aux_coefficient = self.aux_coefficient
        result.reference = None if self.reference is None else self.reference.to(device)
        return result


@dataclass(frozen=True)
class TokenRequest:
    """What :meth:`fuyou.Engine.tokens` has to return."""

    outputs: Sequence[str]
    head: HeadFunction | None
    inputs: Mapping[str, torch.Tensor]  # The caller's own tensors ``[B, S, ...]``, for ``head``
    reference: bool

    def open(self, model: OpenModel, batch: TrainingBatch) -> TokenPass:
        """Return a pass that gives it for a batch.

        Raises:
            UserError: it cannot be given.
        """
        if self.reference:
            check_reference(model)
        rows, positions = batch.size
        config = model.config.get_text_config()
        classes = None if model.task_type.generates else model.config.num_labels
        if model.task_type is TaskType.SEQUENCE_CLASSIFICATION:
            positions = 1
        for name, value in self.inputs.items():
            if not isinstance(value, torch.Tensor) or value.shape[:2] != (rows, positions):
                shape = list(value.shape) if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
                raise UserError(
                    f"inputs[{name!r}] is {shape}: it must be a tensor [{rows}, {positions}, ...]."
                )
        inputs = {name: value.cpu() for name, value in self.inputs.items()}
        head = TokenHead(self.outputs, self.head, classes)
        few = torch.zeros(2, dtype=torch.int64)
        tokens = {name: value.new_zeros(2, *value.shape[2:]) for name, value in inputs.items()}
        examples = head.shapes(classes or config.vocab_size, {"targets": few, "input_ids": few, **tokens})
        return TokenPass(head, examples, rows, positions, inputs, self.reference)


def streamed_values(
    values: Mapping[str, torch.Tensor],
    backward: Callable[[dict[str, torch.Tensor]], None],
    norm: "tuple[torch.nn.Parameter, Callable[[], float]] | None" = None,
) -> dict[str, torch.Tensor]:
    """Return ``values`` as the beginning of a graph, at whose end autograd calls ``backward`` with their gradients.

    Args:
        values: on the CPU, so that ``backward`` runs in the caller's thread on any device.
        backward: gets the gradients of those that the loss depends on, by name.
        norm: a scalar parameter whose gradient is to be what the function returns once ``backward`` is done.
    """
    names = [name for name, value in values.items() if value.is_floating_point()]
    anchor, norm_of = (torch.ones((), requires_grad=True), None) if norm is None else norm
    result = _StreamedValues.apply(anchor, names, backward, norm_of, *(values[name] for name in names))
    return dict(values) | dict(zip(names, result, strict=True))


class _StreamedValues(torch.autograd.Function):
    """An autograd function whose backward pass is the streamed one."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        names: list[str],
        backward: Callable[[dict[str, torch.Tensor]], None],
        norm_of: Callable[[], float] | None,
        *values: torch.Tensor,
    ) -> Any:
        ctx.names = names
        ctx.streamed = backward
        ctx.norm_of = norm_of
        ctx.set_materialize_grads(False)
        return tuple(value.clone() for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if ctx.streamed is None:
            raise FinetuneError(
                "backward() was called twice on what tokens() returned: the blocks stream once. Add all parts of the "
                "loss, and call backward() on their sum."
            )
        streamed = ctx.streamed
        ctx.streamed = None
        streamed(
            {
                name: gradient
                for name, gradient in zip(ctx.names, gradients, strict=True)
                if gradient is not None
            }
        )
        norm = None if ctx.norm_of is None else torch.tensor(ctx.norm_of())
        return norm, *(None,) * (3 + len(gradients))
