"""Experts as transformers' ``grouped_mm`` computes them, range by range.

Rows (pairs of a token and one of its experts) are sorted by expert, so a range of experts has a range of rows. The
forward pass saves hidden states and routing and nothing else; the backward pass computes each range once more, and
hands its gradients on at once. All numbers are those of ``grouped_mm_experts_forward``: matrix products are separate
for each expert, the rest is separate for each row, and what adds rows up does so once, over all of them.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch.nn import functional
from transformers.integrations.moe import _grouped_linear

from fuyou.layout.record_parts import PiecePart
from fuyou.pieces.expert_adapters import Factors, replaced_forward, tensors_of
from fuyou.pieces.run import PieceSource, Use, current_supply

_put = torch.ops.aten._index_put_impl_
# Elements, or a divisor's multiple, that a CPU's kernels compute at once: two registers of 16-bit numbers
_VECTOR = 64


@dataclass(frozen=True)
class _Routing:
    experts: torch.Tensor  # Expert of each row, int64 `[R]`
    order: torch.Tensor  # Place of each row among the rows by token, int64 `[R]`
    tokens: torch.Tensor  # Token of each row, int64 `[R]`
    offsets: torch.Tensor  # End of each expert's rows, int32 `[E]`
    ends: list[int]  # The same on the host, which waits for them

    @staticmethod
    def of(index: torch.Tensor, experts: int) -> "_Routing":
        """Sort rows as transformers does: once for all, since an unstable sort of a part gives another order."""
        sorted_experts, order = torch.sort(index.reshape(-1))
        counted = sorted_experts.float() if index.device.type == "cpu" else sorted_experts.int()
        counts = torch.histc(counted, bins=experts, min=0, max=experts - 1)
        offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
        return _Routing(sorted_experts, order, order // index.size(-1), offsets, offsets.tolist())

    def rows(self, first: int, last: int) -> slice:
        return slice(self.ends[first - 1] if first else 0, self.ends[last - 1])


class GroupedExperts:
    """Replaces the ``grouped_mm`` of a module of experts.

    Args:
        parts: for the first name of each parameter, its ranges in order.
        trained: first names of those that are trained.
        wrappers: what peft has put around the module.
        skips: whether a pass with gradients leaves the experts out, because nothing saves what comes of their output:
            then that output is zero there.
    """

    def __init__(
        self,
        module: Any,
        source: PieceSource,
        parts: Mapping[str, Sequence[PiecePart]],
        trained: Collection[str],
        wrappers: Sequence[ParamWrapper],
        skips: bool,
    ):
        self.skips = skips
        self._module = module
        self._source = source
        self._wrappers = wrappers
        # The parts of each range of experts, by name in the module
        self._parts = [
            {name.rpartition(".")[2]: part for name, part in zip(parts, of_range, strict=True)}
            for of_range in zip(*parts.values(), strict=True)
        ]
        self._ranges = [part.experts for part in next(iter(parts.values())) if part.experts is not None]
        self._trained = {name.rpartition(".")[2] for name in parts if name in trained}

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Let the module compute range by range while the context is open, and add its adapters."""
        with ExitStack() as opened:
            for wrapper in self._wrappers:  # which only call what they are around
                opened.enter_context(replaced_forward(wrapper, wrapper.base_layer.__call__))
            opened.enter_context(replaced_forward(self._module, self))
            yield

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of the chosen experts' outputs.

        Args:
            hidden_states: ``[T, H]``.
            top_k_index: chosen experts, int64 ``[T, K]``.
            top_k_weights: their weights, ``[T, K]``.
        """
        factors = {wrapper.parameter_name: Factors.of_all(wrapper) for wrapper in self._wrappers}
        inputs = (hidden_states, top_k_index, top_k_weights)
        if not torch.is_grad_enabled():
            return self.forward(*inputs, factors)
        leaves = [value for value in self._module._parameters.values() if value is not None]
        result: torch.Tensor = _Grouped.apply(self, factors, *inputs, *tensors_of(factors), *leaves)
        return result

    def forward(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, factors: Mapping[str, Factors]
    ) -> torch.Tensor:
        """Compute all ranges, one after another."""
        result: torch.Tensor | None = None  # of all rows, which stays from range to range
        if not current_supply().computes:
            result = hidden.new_empty(index.numel(), hidden.shape[-1])
            for parts in self._parts:
                self._source.fetch(parts.values(), Use.FORWARD)
            return torch.empty_like(hidden)
        routing = _Routing.of(index, self._module.num_experts)
        for number, (first, last) in enumerate(self._ranges):
            rows = routing.rows(first, last)
            if rows.start == rows.stop:
                continue
            states = hidden[routing.tokens[rows]]
            part = self._range(number, *self._fetch(number, Use.FORWARD, factors), states, routing)
            if result is None:
                result = part.new_empty(index.numel(), part.shape[1])
            result[rows] = part
        assert result is not None
        back = torch.empty_like(routing.order)
        back[routing.order] = torch.arange(len(back), device=back.device)
        result = result[back]
        # Weighted at the end: where routers compute in fp32, that makes fp32 of all rows.
        factor = weights.reshape(-1, 1)
        result = result.mul_(factor) if factor.dtype == result.dtype else result * factor
        return result.view(*index.shape, -1).sum(dim=1).to(hidden.dtype)

    def _fetch(
        self, number: int, use: Use, factors: Mapping[str, Factors]
    ) -> tuple[dict[str, torch.Tensor], dict[str, Factors]]:
        """Return the parameters and factors of a range, in the dtypes of the module, once they are on the device."""
        parts = self._parts[number]
        weights = self._source.fetch(parts.values(), use)
        values = {
            name: weights[part].to(self._module._parameters[name].dtype) for name, part in parts.items()
        }
        return values, {name: factor.of(*self._ranges[number]) for name, factor in factors.items()}

    def _range(
        self,
        number: int,
        parameters: Mapping[str, torch.Tensor],
        factors: Mapping[str, Factors],
        states: torch.Tensor,
        routing: _Routing,
    ) -> torch.Tensor:
        """Return the outputs of a range of experts, ``[rows, H]``, as ``grouped_mm_experts_forward`` makes them."""
        module, (first, last) = self._module, self._ranges[number]
        rows = routing.rows(first, last)
        offsets = routing.offsets[first:last] - rows.start
        experts = routing.experts[rows] - first

        def adapted(name: str) -> torch.Tensor:
            value = parameters[name]
            return factors[name].added_to(value) if name in factors else value

        def project(values: torch.Tensor, name: str) -> torch.Tensor:
            bias = adapted(f"{name}_bias")[experts] if module.has_bias else None
            return _grouped_linear(
                values, adapted(name), offsets, bias=bias, is_transposed=module.is_transposed
            )

        if module.has_gate:
            inner = _at_its_place(
                module._apply_gate, project(states, "gate_up_proj"), rows, len(routing.order), 2
            )
        else:
            inner = _at_its_place(module.act_fn, project(states, "up_proj"), rows, len(routing.order), 1)
        outer = project(inner, "down_proj")
        if getattr(module, "has_post_expert_norm", False):
            outer = module.post_expert_norm(outer)
        return outer

    def backward(
        self,
        saved: tuple[torch.Tensor, ...],
        factors: Mapping[str, Factors],
        gradient: torch.Tensor,
        needed: tuple[bool, bool],
    ) -> list[torch.Tensor | None]:
        """Compute each range again and differentiate it.

        Args:
            saved: hidden states, chosen experts, and their weights.
            gradient: gradient of the output, ``[T, H]``.
            needed: whether hidden states and weights have gradients.

        Returns:
            The gradients of hidden states, of weights, and of the factors' tensors.
        """
        of_factors = [
            torch.zeros_like(factor) if factor.requires_grad else None for factor in tensors_of(factors)
        ]
        if not current_supply().computes:
            for number, parts in reversed(list(enumerate(self._parts))):
                self._source.fetch(parts.values(), Use.FORWARD)
                self._source.fetch(parts.values(), Use.BACKWARD)
                self._pass_on_zeros(number)
            return [torch.empty_like(saved[0]), torch.empty_like(saved[2]), *of_factors]
        routing = _Routing.of(saved[1], self._module.num_experts)
        hidden, _, weights = (each.detach() for each in saved)
        inputs = (hidden, weights.reshape(-1, 1))
        indices = (routing.tokens, routing.order)
        rows = [
            each.new_empty(len(index), each.shape[1]) if want else None
            for each, index, want in zip(inputs, indices, needed, strict=True)
        ]
        for number in reversed(range(len(self._ranges))):
            self._differentiate(number, inputs, factors, gradient, (rows, of_factors), routing)
        # What autograd does for ``hidden[tokens]``, of which there is no need to have all rows at once.
        gradients = [
            None if of_rows is None else _put(torch.zeros_like(each), [index], of_rows, True, True)
            for each, index, of_rows in zip(inputs, indices, rows, strict=True)
        ]
        return [gradients[0], None if gradients[1] is None else gradients[1].view(weights.shape), *of_factors]

    def _differentiate(
        self,
        number: int,
        inputs: tuple[torch.Tensor, torch.Tensor],
        factors: Mapping[str, Factors],
        gradient: torch.Tensor,
        sums: tuple[list[torch.Tensor | None], list[torch.Tensor | None]],
        routing: _Routing,
    ) -> None:
        """Differentiate one range: hand its parameters' gradients on, and put those of its rows, and of its experts'
        factors, into ``gradients``."""
        first, last = self._ranges[number]
        rows = routing.rows(first, last)
        if rows.start == rows.stop:
            self._pass_on_zeros(number)
            return
        indices = [rows, rows, *[slice(first, last)] * len(sums[1])]
        both = zip([*sums[0], *sums[1]], indices, strict=True)
        targets = [
            (target, index) for target, index in both if target is not None and index.start < index.stop
        ]
        if not (targets or self._trained):
            return
        with torch.enable_grad():
            values, range_factors = self._fetch(number, Use.BACKWARD, factors)
            parameters = {
                name: value.detach().requires_grad_(name in self._trained) for name, value in values.items()
            }
            states, weights = (
                each[index[rows]].requires_grad_(target is not None)
                for each, index, target in zip(inputs, (routing.tokens, routing.order), sums[0], strict=True)
            )
            result = self._range(number, parameters, range_factors, states, routing) * weights
        candidates = (states, weights, *tensors_of(range_factors), *parameters.values())
        leaves = [leaf for leaf in candidates if leaf.requires_grad]
        gradients = iter(torch.autograd.grad(result, leaves, gradient.to(result.dtype)[routing.tokens[rows]]))
        for target, index in targets:
            target[index] = next(gradients)
        for name, part in self._parts[number].items():
            if name in self._trained:
                self._source.take_gradient(part, next(gradients))

    def _pass_on_zeros(self, number: int) -> None:
        for name, part in self._parts[number].items():
            if name in self._trained:
                weights = self._source.fetch((part,), Use.GRADIENT)
                self._source.take_gradient(part, torch.zeros_like(weights[part]))


def _at_its_place(
    activate: Callable[[torch.Tensor], torch.Tensor],
    values: torch.Tensor,
    rows: slice,
    count: int,
    parts: int,
) -> torch.Tensor:
    """Return ``activate(values)`` with the numbers that these rows have when all of ``count`` rows are computed.

    A CPU computes the last elements of a tensor, which do not fill a vector register, in another way than the others
    (``silu`` and ``sigmoid`` differ in the last bit). So rows are added, before or behind, that let the same elements
    be the last ones. Where a row fills whole registers, there are no last ones. (Several threads cut a large tensor at
    other places: there the numbers are those of a single thread only.)
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
        factors: Mapping[str, Factors],
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        # which are views of what outlives the pass
        ctx.experts = experts
        ctx.factors = factors
        ctx.leaves = len(tensors) - len(tensors_of(factors))
        ctx.save_for_backward(hidden, index, weights)
        return torch.zeros_like(hidden) if experts.skips else experts.forward(hidden, index, weights, factors)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        needed = (ctx.needs_input_grad[2], ctx.needs_input_grad[4])
        of_hidden, of_weights, *of_factors = ctx.experts.backward(
            ctx.saved_tensors, ctx.factors, gradient, needed
        )
        return None, None, of_hidden, None, of_weights, *of_factors, *(None for _ in range(ctx.leaves))
