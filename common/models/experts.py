"""Which experts of a mixture tokens are sent to, and which experts are worth training on such tokens.

After ESFT (Wang et al. 2024, arXiv:2407.01906), section 3: tokens of one task keep to a few experts, and training these
alone is as good as training all. An expert's relevance is its share of the tokens, or of the gates' weights. Here every
token of the data weighs the same, where the paper takes means over samples first.
"""

import heapq
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from common.errors import FinetuneError, UserError

SCORES = ("gates", "tokens")
"""Kinds of relevance: the mean weight that the router gives an expert (the paper's ESFT-Gate), and how often it is
chosen (ESFT-Token)."""


@dataclass(frozen=True)
class LayerUsage:
    """The experts of one layer, as tokens were sent to them."""

    tokens: tuple[int, ...]
    """Number of tokens that were sent to each expert."""
    gates: tuple[float, ...]
    """Sum of the weights that each expert's output was multiplied by."""

    def relevance(self, score: str) -> list[float]:
        """Return each expert's share of what all experts have; equal ones if they have nothing.

        Args:
            score: one of :data:`SCORES`.
        """
        values: Sequence[float] = getattr(self, score)
        total = sum(values)
        return [value / total if total > 0 else 1 / len(values) for value in values]


@dataclass(frozen=True)
class ExpertUsage:
    """The experts of all layers, by the names of the modules that they are parameters of."""

    layers: dict[str, LayerUsage]

    @staticmethod
    def combined(several: Sequence["ExpertUsage"]) -> "ExpertUsage":
        """Return the usage by the tokens of all of these together."""

        def added(name: str, field: str) -> tuple[Any, ...]:
            return tuple(
                sum(values) for values in zip(*(getattr(one.layers[name], field) for one in several), strict=True)
            )

        return ExpertUsage(
            {name: LayerUsage(added(name, "tokens"), added(name, "gates")) for name in several[0].layers}
        )


@dataclass(frozen=True)
class ExpertChoice:
    """The experts that are to be trained."""

    score: str
    """Kind of relevance by which they were chosen, one of :data:`SCORES`."""
    fraction: float
    """Part of all experts that may be trained."""
    experts: dict[str, tuple[int, ...]]
    """Numbers of the chosen experts, ascending, by the name of their module."""
    usage: ExpertUsage
    """What they were chosen by."""

    def to_dict(self) -> dict[str, Any]:
        """Return this for JSON."""
        return asdict(self)


def choose_experts(usage: ExpertUsage, fraction: float, score: str = "gates") -> ExpertChoice:
    """Choose the most relevant experts of every layer, at least one each.

    As in the paper, layers have as many chosen experts as it takes for these to have a part p of the relevance in each
    layer. Here p is not given, but the largest for which ``fraction`` of all experts are enough.

    Args:
        usage: of the experts by the data that they are to be trained on.
        fraction: part of all experts that may be chosen, more than 0 and at most 1.
        score: kind of relevance, one of :data:`SCORES`.

    Raises:
        UserError: ``fraction`` or ``score`` is out of range.
    """
    if not 0 < fraction <= 1:
        raise UserError(f"The part of the experts to train must be more than 0 and at most 1, not {fraction:g}.")
    if score not in SCORES:
        raise UserError(f"Experts are chosen by {' or '.join(SCORES)}, not by {score!r}.")
    relevance = {name: layer.relevance(score) for name, layer in usage.layers.items()}
    # Stable: of equally relevant experts the first.
    order = {
        name: sorted(range(len(values)), key=values.__getitem__, reverse=True) for name, values in relevance.items()
    }
    chosen = {name: [best[0]] for name, best in order.items()}
    budget = int(fraction * sum(map(len, order.values())))
    # Always where the chosen ones have least: so the least part that any layer's have becomes as large as it can.
    least = [(relevance[name][best[0]], position, name) for position, (name, best) in enumerate(order.items())]
    heapq.heapify(least)
    while least and sum(map(len, chosen.values())) < budget:
        part, position, name = heapq.heappop(least)
        if len(chosen[name]) < len(order[name]):
            following = order[name][len(chosen[name])]
            chosen[name].append(following)
            heapq.heappush(least, (part + relevance[name][following], position, name))
    return ExpertChoice(score, fraction, {name: tuple(sorted(best)) for name, best in chosen.items()}, usage)


class UsageRecorder:
    """Counts what routers send to the experts of a model, while :meth:`recording` lasts.

    Experts are modules whose parameters hold all of them, as transformers' interface for experts has it: they are
    called with hidden states, the numbers of the chosen experts, ``[tokens, k]``, and weights of that shape.

    Raises:
        UserError: the model has none.
    """

    def __init__(self, model: nn.Module):
        self._modules = {name: module for name, module in model.named_modules() if _holds_experts(module)}
        if not self._modules:
            raise UserError(
                f"{type(model).__name__} has no experts that are fused into parameters, so what its routers choose "
                "cannot be seen: there is nothing to choose experts by."
            )
        self._sums = {name: torch.zeros(2, _experts(one), dtype=torch.float64) for name, one in self._modules.items()}
        self._mask: torch.Tensor | None = None
        self._seen: dict[str, int] = {}

    @contextmanager
    def recording(self, mask: torch.Tensor | None = None) -> Iterator[None]:
        """Count the tokens of one batch, whose micro-batches pass each layer in order.

        Args:
            mask: ``[B, S]``, 0 for tokens that do not count; None: all count.
        """
        self._mask = None if mask is None else mask.flatten().cpu().bool()
        self._seen = dict.fromkeys(self._modules, 0)
        with ExitStack() as stack:
            for name, module in self._modules.items():
                handle = module.register_forward_pre_hook(
                    lambda _, args, kwargs, name=name: self._count(name, [*args, *kwargs.values()]), with_kwargs=True
                )
                stack.callback(handle.remove)
            yield

    def usage(self) -> ExpertUsage:
        """Return what has been counted, by the modules' names without adapters."""
        return ExpertUsage(
            {
                name.replace(".base_layer", ""): LayerUsage(tuple(map(int, tokens.tolist())), tuple(gates.tolist()))
                for name, (tokens, gates) in self._sums.items()
            }
        )

    def _count(self, name: str, values: Sequence[Any]) -> None:
        tensors = [value for value in values if isinstance(value, torch.Tensor)][1:]  # the first: hidden states
        index = next((one for one in tensors if one.dim() == 2 and not one.is_floating_point()), None)
        shape = None if index is None else index.shape
        weights = next((one for one in tensors if one.shape == shape and one.is_floating_point()), None)
        if index is None or weights is None:
            raise FinetuneError(
                f"{name} is not called with the numbers and weights of the chosen experts, so what its router chooses "
                "cannot be counted."
            )
        count, start = index.shape[0], self._seen[name]
        self._seen[name] += count
        chosen, gates = index.detach().cpu().long(), weights.detach().cpu().double()
        if self._mask is not None:
            counts = self._mask[start : start + count]
            chosen, gates = chosen[counts], gates[counts]
        there = chosen < self._sums[name].shape[1]  # what is beyond computes nothing (LongCat's zero experts)
        tokens, weighted = self._sums[name]
        tokens.index_add_(0, chosen[there], torch.ones(int(there.sum()), dtype=torch.float64))
        weighted.index_add_(0, chosen[there], gates[there])


def _holds_experts(module: nn.Module) -> bool:
    count = getattr(module, "num_experts", None)
    own = list(module.parameters(recurse=False))
    return isinstance(count, int) and any(one.dim() == 3 and one.shape[0] == count for one in own)


def _experts(module: nn.Module) -> int:
    return int(module.num_experts)  # type: ignore[arg-type]
