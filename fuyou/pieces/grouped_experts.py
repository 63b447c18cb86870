"""Experts as transformers' ``grouped_mm`` computes them, range by range.

Rows (pairs of a token and one of its experts) are sorted by expert, so a range of experts has a range of rows. The
forward pass saves hidden states and routing and nothing else; the backward pass computes each range once more, and
hands its gradients on at once. All numbers are those of ``grouped_mm_experts_forward``: matrix products are separate
for each expert, the rest is separate for each row, and what adds rows up does so once, over all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers.integrations.moe import _grouped_linear

from fuyou.pieces.expert_parts import ExpertParts
from fuyou.pieces.run import Use, current_supply

_VECTOR = 64
"""Elements, or a divisor's multiple, that a CPU's kernels compute at once: two registers of 16-bit numbers."""


@dataclass(frozen=True)
class _Routing:
    """Which rows there are, sorted by expert."""

    experts: torch.Tensor
    """Expert of each row, int64 ``[R]``."""
    order: torch.Tensor
    """Place of each row among the rows by token, int64 ``[R]``."""
    tokens: torch.Tensor
    """Token of each row, int64 ``[R]``."""
    offsets: torch.Tensor
    """End of each expert's rows, int32 ``[E]``."""
    ends: list[int]
    """The same on the host."""

    @staticmethod
    def of(index: torch.Tensor, experts: int) -> "_Routing":
        """Sort rows as transformers does: once for all, since an unstable sort of a part gives another order."""
        sorted_experts, order = torch.sort(index.reshape(-1))
        counted = sorted_experts.float() if index.device.type == "cpu" else sorted_experts.int()
        counts = torch.histc(counted, bins=experts, min=0, max=experts - 1)
        offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
        return _Routing(sorted_experts, order, order // index.size(-1), offsets, offsets.tolist())

    def rows(self, first: int, last: int) -> slice:
        """Return the rows of experts ``[first, last)``."""
        return slice(self.ends[first - 1] if first else 0, self.ends[last - 1])


class GroupedExperts:
    """Takes the place of a module's ``grouped_mm``.

    Args:
        mixture: the experts.
        skips: whether a pass with gradients leaves the experts out, because nothing saves what comes of their output:
            then that output is zero there.
    """

    def __init__(self, mixture: ExpertParts, skips: bool):
        self._mixture, self._skips = mixture, skips
        self.own: Callable[..., torch.Tensor] | None = None
        """The module's own way to compute."""

    def __call__(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the chosen experts' outputs.

        Args:
            hidden: ``[T, H]``.
            index: chosen experts, int64 ``[T, K]``.
            weights: their weights, ``[T, K]``.
        """
        if not torch.is_grad_enabled():
            return self.forward(hidden, index, weights)
        result: torch.Tensor = _Grouped.apply(self, hidden, index, weights, *self._mixture.leaves())
        return result

    def skipped(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return what a pass with gradients gives for the output without computing it; None: it is computed."""
        return torch.zeros_like(hidden) if self._skips else None

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Compute all ranges, one after another."""
        if not current_supply().computes:
            self._mixture.note_forward()
            return torch.empty_like(hidden)
        routing = _Routing.of(index, self._mixture.module.num_experts)
        row_weights = weights.reshape(-1)[routing.order]
        result: torch.Tensor | None = None
        for number, (first, last) in enumerate(self._mixture.ranges):
            rows = routing.rows(first, last)
            if rows.start == rows.stop:
                continue
            own = self._mixture.fetch(number, Use.FORWARD)
            part = self._range(number, own, hidden[routing.tokens[rows]], row_weights[rows], routing)
            del own
            if result is None:
                result = part.new_empty(len(row_weights), part.shape[1])
            result[rows] = part
        assert result is not None
        back = torch.empty_like(routing.order)
        back[routing.order] = torch.arange(len(back), device=back.device)
        return result[back].view(*index.shape, -1).sum(dim=1).to(hidden.dtype)

    def _range(
        self, number: int, own: dict[str, torch.Tensor], states: torch.Tensor, weights: torch.Tensor, routing: _Routing
    ) -> torch.Tensor:
        """Return the weighted outputs of a range of experts, ``[rows, H]``, as ``grouped_mm_experts_forward`` does."""
        module = self._mixture.module
        first, last = self._mixture.ranges[number]
        rows = routing.rows(first, last)
        offsets = routing.offsets[first:last] - rows.start
        experts = routing.experts[rows] - first

        def project(values: torch.Tensor, name: str) -> torch.Tensor:
            bias = own[f"{name}_bias"][experts] if module.has_bias else None
            return _grouped_linear(values, own[name], offsets, bias=bias, is_transposed=module.is_transposed)

        if module.has_gate:
            inner = _at_its_place(module._apply_gate, project(states, "gate_up_proj"), rows, len(routing.order), 2)
        else:
            inner = _at_its_place(module.act_fn, project(states, "up_proj"), rows, len(routing.order), 1)
        outer = project(inner, "down_proj")
        if module.has_post_expert_norm:
            outer = module.post_expert_norm(outer)
        return outer * weights.unsqueeze(-1)

    def backward(
        self, saved: tuple[torch.Tensor, ...], gradient: torch.Tensor, wanted: tuple[bool, bool]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Compute each range again and differentiate it; return the gradients of hidden states and weights.

        Args:
            saved: hidden states, chosen experts, and their weights.
            gradient: gradient of the output, ``[T, H]``.
            wanted: whether hidden states and weights have gradients.
        """
        if not current_supply().computes:
            self._mixture.note_backward(recomputes=True)
            return torch.empty_like(saved[0]), torch.empty_like(saved[2])
        routing = _Routing.of(saved[1], self._mixture.module.num_experts)
        with torch.enable_grad():
            hidden, weights = (saved[at].detach().requires_grad_(want) for at, want in zip((0, 2), wanted, strict=True))
            states, row_weights = hidden[routing.tokens], weights.reshape(-1)[routing.order]
        rows = [
            torch.empty_like(each) if want else None for each, want in zip((states, row_weights), wanted, strict=True)
        ]
        for number in reversed(range(len(self._mixture.ranges))):
            self._differentiate(number, (states.detach(), row_weights.detach()), gradient, rows, routing)
        found = [
            torch.autograd.grad(made, leaf, each)[0] if each is not None else None
            for made, leaf, each in zip((states, row_weights), (hidden, weights), rows, strict=True)
        ]
        return found[0], found[1]

    def _differentiate(
        self,
        number: int,
        inputs: tuple[torch.Tensor, torch.Tensor],
        gradient: torch.Tensor,
        found: list[torch.Tensor | None],
        routing: _Routing,
    ) -> None:
        """Differentiate one range: hand its parameters' gradients on, and put those of its rows into ``found``."""
        rows = routing.rows(*self._mixture.ranges[number])
        if rows.start == rows.stop:
            self._mixture.hand_on_zeros(number)
            return
        trained = self._mixture.trained_parts(number)
        with torch.enable_grad():
            own = {
                name: value.detach().requires_grad_(name in trained)
                for name, value in self._mixture.fetch(number, Use.BACKWARD).items()
            }
            states, weights = (
                each[rows].requires_grad_(target is not None) for each, target in zip(inputs, found, strict=True)
            )
            result = self._range(number, own, states, weights, routing)
        leaves = [leaf for leaf in (states, weights, *own.values()) if leaf.requires_grad]
        gradients = iter(torch.autograd.grad(result, leaves, gradient.to(result.dtype)[routing.tokens[rows]]))
        for target in found:
            if target is not None:
                target[rows] = next(gradients)
        for name in own:
            if name in trained:
                self._mixture.source.take_gradient(trained[name], next(gradients))


def _at_its_place(
    activate: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor, rows: slice, count: int, parts: int
) -> torch.Tensor:
    """Return ``activate(values)`` with the numbers that these rows have when all of ``count`` rows are computed.

    A CPU computes the last elements of a tensor, which do not fill a vector register, in another way than the others
    (``silu`` and ``sigmoid`` differ in the last bit). So rows are added, before or behind, that let the same elements
    be the last ones. Where a row fills whole registers, there are no last ones. (Several threads cut a large tensor at
    places of their own: there the numbers are those of a single thread only.)

    Args:
        activate: takes ``[rows, parts * I]``, returns ``[rows, I]``.
        values: some of the rows.
        rows: which.
        count: number of all rows.
        parts: as above.
    """
    width = values.shape[1] // parts
    if values.device.type != "cpu" or width % _VECTOR == 0:
        return activate(values)
    is_last = rows.stop == count
    before = (count - len(values)) % _VECTOR if is_last else 0
    behind = 0 if is_last else -(-_VECTOR // width)
    return activate(functional.pad(values, (0, 0, before, behind)))[before : before + len(values)]


class _Grouped(torch.autograd.Function):
    """:class:`GroupedExperts` for autograd. Gradients of parameters take their own way."""

    @staticmethod
    def forward(
        ctx: Any,
        experts: GroupedExperts,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        *leaves: torch.Tensor,
    ) -> torch.Tensor:
        ctx.experts, ctx.leaves = experts, len(leaves)
        ctx.save_for_backward(hidden, index, weights)
        skipped = experts.skipped(hidden)
        return experts.forward(hidden, index, weights) if skipped is None else skipped

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        wanted = (ctx.needs_input_grad[1], ctx.needs_input_grad[3])
        of_hidden, of_weights = ctx.experts.backward(ctx.saved_tensors, gradient, wanted)
        return None, of_hidden, None, of_weights, *(None for _ in range(ctx.leaves))
