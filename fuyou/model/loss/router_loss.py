"""Router losses of mixtures of experts, exactly, without another pass over the blocks.

transformers' load-balancing loss is a function of sums over all tokens and all layers: how many tokens chose each
expert, and the router's probabilities (Switch Transformer, equations 4 to 6). The forward pass adds them up, block by
block and micro-batch by micro-batch; when it ends they are complete, and with them the loss of the whole batch. Its
gradient with respect to the sums of probabilities is then one number for each expert, and each block's backward pass,
which computes the block once more, gives it on to that block's router. Several ranks add their sums: the loss is that
of one batch over all ranks.

Every family has its own copy of that function, which is tried out on random logits.
"""

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import output_capturing

from common.errors import FinetuneError, UserError, did_you_mean

CHOICES = ("auto", "on", "off")  # `auto`: as `output_router_logits` in the model's configuration says
_FUNCTION = "load_balancing_loss_func"  # Name that the function has in every family


@dataclass(frozen=True)
class RouterLoss:
    """The load-balancing loss that a family adds to the cross entropy."""

    coefficient: float  # Factor of the loss
    experts: int
    top_k: int  # Number of experts that are chosen for each token

    def sums(self, logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return what the loss depends on of one router: for each expert, choices and probabilities, fp32 ``[2, E]``.

        Args:
            logits: ``[N, E]``.
            mask: fp32 ``[N]``, 1 for each token that counts.
        """
        weights = logits.softmax(-1)
        chosen = weights.topk(self.top_k, -1).indices
        counts = torch.zeros(self.experts, dtype=torch.float32, device=logits.device)
        counts.scatter_add_(0, chosen.reshape(-1), mask.repeat_interleave(self.top_k))
        return torch.stack([counts, _probabilities(logits, mask)])

    def value(self, counts: torch.Tensor, probabilities: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss, an fp32 scalar, before it is multiplied by its coefficient.

        Args:
            counts, probabilities: fp32 ``[E]``, summed over all tokens of all routers.
            tokens: fp32 scalar: number of these tokens, each counted once for every router.
        """
        return torch.sum(counts / tokens * (probabilities / tokens).unsqueeze(0)) * self.experts


def _probabilities(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (logits.softmax(-1).float() * mask.unsqueeze(-1)).sum(0)


class RouterPass:
    """The router loss of one step (or evaluation): sums from the forward pass, gradients for the backward pass.

    Args:
        loss: the family's loss.
        masks: mask of each micro-batch, fp32 ``[tokens]``, 1 for each token that counts.
    """

    def __init__(self, loss: RouterLoss, masks: Sequence[torch.Tensor]):
        self._loss = loss
        self._masks = masks
        self._sums: torch.Tensor | None = None
        self._tokens: torch.Tensor | None = None
        self._weights: torch.Tensor | None = None
        # The loss, and the probabilities that it is of
        self._graph: tuple[torch.Tensor, torch.Tensor] | None = None
        self.value = math.nan
        """Loss of the whole batch, before it is multiplied by its coefficient; NaN until :meth:`combine`."""
        self.share = torch.tensor(math.nan)
        """Its part of the whole loss, an fp32 scalar on the CPU; NaN until :meth:`combine`."""

    @property
    def coefficient(self) -> float:
        """The family's factor of the loss."""
        return self._loss.coefficient

    @torch.no_grad()
    def add(self, micro: int, logits: Sequence[torch.Tensor]) -> None:
        """Add the logits of a block's routers for a micro-batch, ``[tokens, E]`` each, to the sums."""
        if micro >= len(self._masks):
            return  # of the reference, which is not trained
        mask = self._masks[micro]
        for scores in logits:
            if scores.shape != (mask.numel(), self._loss.experts):
                raise FinetuneError(
                    f"A router has given logits of shape {list(scores.shape)} where {mask.numel()} tokens choose among "
                    f"{self._loss.experts} experts: train without the router loss (router_loss off)."
                )
            sums = self._loss.sums(scores, mask)
            tokens = mask.sum()
            self._sums = sums if self._sums is None else self._sums + sums
            self._tokens = tokens if self._tokens is None else self._tokens + tokens

    def local_sums(self) -> list[float]:
        """Return this rank's sums, all blocks' and micro-batches' together: ``2 E + 1`` numbers."""
        if self._sums is None or self._tokens is None:
            raise FinetuneError(
                "No block of this model has given router logits, which its router loss needs: train without that loss "
                "(router_loss off)."
            )
        return [*self._sums.flatten().tolist(), float(self._tokens)]

    def combine(self, everyone: Sequence[Sequence[float]]) -> None:
        """Compute the loss from the :meth:`local_sums` of all ranks."""
        total = torch.tensor(everyone[0], dtype=torch.float32)
        for sums in everyone[1:]:
            total += torch.tensor(sums, dtype=torch.float32)
        device = self._masks[0].device
        experts = self._loss.experts
        counts, probabilities = total[: 2 * experts].to(device).view(2, experts).unbind()
        probabilities.requires_grad_()
        with torch.enable_grad():
            value = self._loss.value(counts, probabilities, total[-1].to(device))
        self._graph = value, probabilities
        self.value, self.share = float(value.detach()), (self._loss.coefficient * value.detach()).cpu()
        self.weigh(self._loss.coefficient)

    def weigh(self, factor: float) -> None:
        """Let the loss count ``factor`` times in the backward pass; after :meth:`combine`, that is its coefficient."""
        assert self._graph is not None
        value, probabilities = self._graph
        (self._weights,) = torch.autograd.grad(
            value, probabilities, torch.full_like(value, factor), retain_graph=True
        )

    def losses(self, micro: int, logits: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what a block adds to the loss, as its backward pass sees it.

        That is a scalar for each of its routers through which something is trained; the scalar's gradient with respect
        to the router's logits is that of the whole loss.
        """
        assert self._weights is not None
        parts = [scores for scores in logits if scores.requires_grad]
        return [(self._weights * _probabilities(scores, self._masks[micro])).sum() for scores in parts]


@contextlib.contextmanager
def router_logits() -> Iterator[list[torch.Tensor]]:
    """Collect what transformers' own hooks record as router logits of the blocks that run inside the context."""
    recorded: dict[str, list[torch.Tensor]] = {"router_logits": []}
    token = output_capturing._active_collector.set(recorded)
    try:
        yield recorded["router_logits"]
    finally:
        output_capturing._active_collector.reset(token)


# -- what a family does ----------------------------------------------------------------------------------------------


def find_router_loss(model: PreTrainedModel, choice: str) -> RouterLoss | None:
    """Return the router loss that is a part of the loss, if any, and keep the model from adding it itself.

    Args:
        model: not yet split at its blocks; its configuration is changed.
        choice: one of :data:`CHOICES`.

    Raises:
        UserError: ``choice`` is none of these, the model has no router loss to switch on, or it is another one than
            Mixtral's.
    """
    if choice not in CHOICES:
        raise UserError(f"router_loss is auto, on or off, not {choice!r}.{did_you_mean(choice, CHOICES)}")
    configured = any(config.output_router_logits for config in _configs(model))
    switch_router_logits(model, False)
    if choice == "off" or (choice == "auto" and not configured):
        return None
    function = inspect.unwrap(type(model).forward).__globals__.get(_FUNCTION)
    if function is not None:
        output_capturing.maybe_install_capturing_hooks(model)
        return _checked(model, function)
    if choice == "on":
        raise UserError(
            f"{type(model).__name__} has no router loss: output_router_logits does not change what it returns as its "
            "loss. Leave --router-loss out."
        )
    return None


def switch_router_logits(model: PreTrainedModel, on: bool) -> None:
    """Let the model's parts collect router logits, or not."""
    if on:  # now, while its blocks are what they are: the model itself would do it when it runs
        output_capturing.maybe_install_capturing_hooks(model)
    for config in _configs(model):
        config.output_router_logits = on


def _configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Return those configurations of a model and its parts that have ``output_router_logits``."""
    configs = [part.config for part in model.modules() if isinstance(part, PreTrainedModel)]
    return [
        config
        for config in (*configs, model.config.get_text_config())
        if hasattr(config, "output_router_logits")
    ]


def _checked(model: PreTrainedModel, function: Callable[..., torch.Tensor]) -> RouterLoss:
    """Return the loss that ``function`` computes for a model, once both agree on random logits."""

    def setting(*names: str) -> Any:
        owners = (model, model.config.get_text_config())
        return next(getattr(owner, name) for owner in owners for name in names if hasattr(owner, name))

    try:
        loss = RouterLoss(
            float(setting("router_aux_loss_coef", "aux_loss_coef")),
            int(setting("num_experts")),
            int(setting("num_experts_per_tok")),
        )
        layers = torch.randn(3, 6, loss.experts, generator=torch.Generator().manual_seed(0))
        mask = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 0.0])
        theirs = function(tuple(layers), loss.experts, top_k=loss.top_k, attention_mask=mask[None])
        counts, probabilities = torch.stack([loss.sums(each, mask) for each in layers]).sum(0)
        torch.testing.assert_close(loss.value(counts, probabilities, len(layers) * mask.sum()), theirs)
    except Exception as error:  # another signature, other shapes, other numbers
        raise UserError(
            f"The configuration of this {model.config.model_type!r} model has output_router_logits on, and its router "
            f"loss cannot be streamed: its {_FUNCTION} is not that of Mixtral ({type(error).__name__}). Train without "
            "that loss: --router-loss off."
        ) from error
    return loss
