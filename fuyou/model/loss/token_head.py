"""What a caller's own loss is made of: numbers for each token, made from logits that never exist all at once.

The head runs over ranges of tokens, and what is made of their logits is made in passes over fewer tokens still, as the
ordinary loss is (:mod:`fuyou.model.loss.cross_entropy`). In the backward pass the same is computed again, with the
gradients that the caller's loss has sent back. Tokens are independent of each other, so the result is that of all
logits at once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch.nn import functional

from common.errors import FinetuneError, UserError, did_you_mean
from fuyou.model.loss.cross_entropy import IGNORED, tokens_per_pass

# A function of the logits `[n, V]` of n tokens and of what the batch has for each of them (`input_ids` `[n]`, `targets`
# `[n]`, and the caller's own `inputs` `[n, ...]`), which returns tensors `[n, ...]` by name.
HeadFunction = Callable[[torch.Tensor, Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]


class _Logits:
    """The logits of a few tokens, and what several outputs need of them, computed once."""

    def __init__(self, logits: torch.Tensor, targets: torch.Tensor):
        self.values = logits.float()  # [n, V]
        self.targets = targets  # [n]

    @cached_property
    def log_softmax(self) -> torch.Tensor:
        return functional.log_softmax(self.values, -1)

    def log_probs(self) -> torch.Tensor:
        # The two halves of functional.cross_entropy: so the gradient of that loss is the ordinary one, bit for bit.
        return -functional.nll_loss(self.log_softmax, self.targets, ignore_index=IGNORED, reduction="none")

    def entropy(self) -> torch.Tensor:
        return -(self.log_softmax.exp() * self.log_softmax).sum(-1)

    def mean_logits(self) -> torch.Tensor:
        return self.values.mean(-1)

    def log_sum_sq_probs(self) -> torch.Tensor:
        return (2 * self.log_softmax).logsumexp(-1)

    def is_top1(self) -> torch.Tensor:
        return self.values.argmax(-1) == self.targets

    def logits(self) -> torch.Tensor:
        return self.values


# Outputs that have a name: the log-probability of each target (0 where there is none), and for every position the
# entropy, the mean logit, the logarithm of the sum of squared probabilities (for TRL's weighted DPO), whether the
# target has the largest logit, and the logits themselves, for classifiers.
OUTPUTS = ("log_probs", "entropy", "mean_logits", "log_sum_sq_probs", "is_top1", "logits")


class TokenHead:
    """Makes outputs from logits, and the gradient of the logits from gradients of the outputs.

    Args:
        function: makes more outputs, token by token.
        classes: logits of each position, if they may be an output: those of classifiers.

    Raises:
        UserError: if an output has no such name, or there is none.
    """

    def __init__(
        self, outputs: Sequence[str], function: HeadFunction | None = None, classes: int | None = None
    ):
        for name in outputs:
            if name not in OUTPUTS:
                raise UserError(f"tokens() has no output {name!r}.{did_you_mean(name, OUTPUTS)}")
        if "logits" in outputs and classes is None:
            raise UserError(
                "The logits of a language model are too many to be kept: ask for log_probs or entropy, or give a head= "
                "function that makes few numbers of a few tokens' logits at a time."
            )
        if not outputs and function is None:
            raise UserError("tokens() needs the name of at least one output, or a head= function.")
        self._outputs = tuple(dict.fromkeys(outputs))
        self._function = function

    def shapes(self, vocabulary: int, tokens: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return an empty example ``[0, ...]`` of each output, found by a trial on two tokens with logits of zero.

        Args:
            tokens: what the batch has for each token, ``[n, ...]`` with n of at least 2; a longer one is cut.
        """
        few = {name: value[:2] for name, value in tokens.items()}
        with torch.no_grad():
            outputs = self._make(torch.zeros(2, vocabulary), few)
        return {name: value[:0] for name, value in outputs.items()}

    @torch.no_grad()
    def values(self, logits: torch.Tensor, tokens: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the outputs, ``[N, ...]`` by name: floating-point ones in fp32.

        Args:
            logits: ``[N, V]``.
            tokens: what the batch has for each token, ``[N, ...]``.
        """
        parts = [
            self._make(logits[part], {name: value[part] for name, value in tokens.items()})
            for part in _passes(logits)
        ]
        return {name: torch.cat([outputs[name] for outputs in parts]) for name in parts[0]}

    def gradient(
        self, logits: torch.Tensor, tokens: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return the gradient of the logits, in their dtype.

        Args:
            logits: ``[N, V]``; their graph is not used.
            tokens: what the batch has for each token, ``[N, ...]``.
            gradients: fp32 ``[N, ...]``, by output; the loss does not depend on outputs that are not there.
        """
        result = torch.zeros_like(logits)
        for part in _passes(logits):
            with torch.enable_grad():
                values = logits[part].detach().requires_grad_()
                outputs = self._make(values, {name: value[part] for name, value in tokens.items()})
            roots = [name for name in gradients if outputs[name].requires_grad]
            if roots:
                above = [gradients[name][part] for name in roots]
                (result[part],) = torch.autograd.grad([outputs[name] for name in roots], values, above)
        return result

    def _make(self, logits: torch.Tensor, tokens: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        computed = _Logits(logits, tokens["targets"])
        outputs: dict[str, Any] = {name: getattr(computed, name)() for name in self._outputs}
        for name, value in (self._function(logits, tokens) if self._function is not None else {}).items():
            if name in OUTPUTS or not isinstance(value, torch.Tensor) or value.shape[:1] != logits.shape[:1]:
                returned = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                raise UserError(
                    f"The head= function returns {returned} as {name!r} for the logits {list(logits.shape)}: it must "
                    "return tensors with one entry for each of these tokens, under names that tokens() does not have."
                )
            outputs[name] = value
        return {
            name: value.float() if value.is_floating_point() else value for name, value in outputs.items()
        }


def _passes(logits: torch.Tensor) -> Iterator[slice]:
    step = tokens_per_pass(logits.shape[0], logits.shape[1], logits.device.type)
    return (slice(start, start + step) for start in range(0, logits.shape[0], step))


def loss_tensor(loss: float, backward: Callable[[], None]) -> torch.Tensor:
    """Return the loss as an fp32 scalar on the CPU, so that ``backward`` runs in the caller's thread on any device."""
    return _StreamingBackward.apply(torch.ones((), requires_grad=True), torch.tensor(loss), backward)


class _StreamingBackward(torch.autograd.Function):
    """An autograd function that calls ``backward`` when autograd comes to the loss."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, loss: torch.Tensor, backward: Callable[[], None]
    ) -> torch.Tensor:
        ctx.streamed = backward
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if float(gradients[0]) != 1.0:
            raise FinetuneError(
                f"The loss was multiplied by {float(gradients[0]):g} before backward(): call backward() on the loss "
                "itself. It is the mean over all labels of the batch, in however many micro-batches that is computed, "
                "so nothing is to be divided by their number: pass the whole batch to engine() at once. A loss of any "
                "other kind, or scale, is made of what engine.tokens() returns."
            )
        ctx.streamed()
        return None, None, None
