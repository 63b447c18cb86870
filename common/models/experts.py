"""Which experts of a mixture tokens are sent to, and which experts are worth training on such tokens.

After ESFT (Wang et al. 2024, arXiv:2407.01906), section 3: tokens of one task keep to a few experts, and training these
alone is as good as training all. An expert's relevance is its share of the tokens, or of the gates' weights. Here every
token of the data weighs the same, where the paper takes means over samples first.
"""

from collections.abc import Iterator, Mapping, Sequence
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

    def to_dict(self) -> dict[str, Any]:
        """Return this for JSON."""
        return asdict(self)

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> "ExpertUsage":
        """Return the usage that :meth:`to_dict` has told of, after JSON."""
        return ExpertUsage(
            {name: LayerUsage(tuple(one["tokens"]), tuple(one["gates"])) for name, one in content["layers"].items()}
        )

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
    experts: dict[str, tuple[int, ...]]
    """Numbers of the chosen experts, ascending, by the name of their module."""
    usage: ExpertUsage
    """What they were chosen by."""

    def part(self, name: str) -> float:
        """Return the part of the relevance that the chosen experts of a module have."""
        relevance = self.usage.layers[name].relevance(self.score)
        return sum(relevance[expert] for expert in self.experts[name])

    def to_dict(self) -> dict[str, Any]:
        """Return this for JSON."""
        return asdict(self)


def most_relevant(usage: ExpertUsage, counts: Mapping[str, int], score: str = "gates") -> ExpertChoice:
    """Choose the most relevant experts of every layer.

    In the paper, a layer has as many as it takes for a given part of its relevance. Here their number is given, so that
    memory and traffic are known before the data are.

    Args:
        usage: of the experts by the data that they are to be trained on.
        counts: number of experts to choose, by the name of their module.
        score: kind of relevance, one of :data:`SCORES`.

    Raises:
        UserError: there is no such ``score``.
    """
    if score not in SCORES:
        raise UserError(f"Experts are chosen by {' or '.join(SCORES)}, not by {score!r}.")
    chosen = {}
    for name, count in counts.items():
        relevance = usage.layers[name].relevance(score)
        # Stable: of equally relevant experts the first.
        best = sorted(range(len(relevance)), key=relevance.__getitem__, reverse=True)
        chosen[name] = tuple(sorted(best[:count]))
    return ExpertChoice(score, chosen, usage)


class UsageRecorder:
    """Counts what routers send to the experts of a model, while :meth:`recording` lasts.

    Experts are modules whose parameters hold all of them, as transformers' interface for experts has it: they are
    called with hidden states, the numbers of the chosen experts, ``[tokens, k]``, and weights of that shape.

    Raises:
        UserError: the model has none.
    """

    def __init__(self, model: nn.Module):
        found = expert_modules(model)
        self._modules = {name: module for name, (module, _) in found.items()}
        if not self._modules:
            raise UserError(
                f"{type(model).__name__} has no experts that are fused into parameters, so what its routers choose "
                "cannot be seen: there is nothing to choose experts by."
            )
        self._sums = {name: torch.zeros(2, count, dtype=torch.float64) for name, (_, count) in found.items()}
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
        hidden, *tensors = (value for value in values if isinstance(value, torch.Tensor))
        if hidden.is_meta:
            return  # a block is run without values, to learn about it: no token of the data is in that
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


def expert_modules(model: nn.Module) -> dict[str, tuple[nn.Module, int]]:
    """Return the modules whose parameters hold a mixture's experts along their first dimension, and the number of
    experts, by their names."""
    return {
        name: (module, experts)
        for name, module in model.named_modules()
        if isinstance(experts := getattr(module, "num_experts", None), int)
        and any(one.dim() == 3 and one.shape[0] == experts for one in module.parameters(recurse=False))
    }
