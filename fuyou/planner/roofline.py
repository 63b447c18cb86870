"""Seconds of a block's passes on a GPU, from its operators and the rates of the GPU's parts."""

from dataclasses import dataclass

from common.hardware.compute_rates import ComputeRates
from common.models.attention import chunked
from fuyou.model.recompute.block_trace import BlockTrace

# A backward pass of attention takes five products where the forward pass takes two.
ATTENTION_BACKWARD = 2.5
# Bytes per token and entry of the vocabulary that the loss moves: logits, the same in fp32, and their gradient, forward
# and twice as many backward.
LOSS_BYTES = 30


@dataclass(frozen=True)
class BlockSeconds:
    """Seconds of a block's parts, for the tokens that were traced."""

    forward: float
    again: float  # What the backward pass computes again if nothing is saved
    gradients: float  # Gradients of inputs and of trained weights


@dataclass(frozen=True)
class _Work:
    """What an operator does for a micro-batch."""

    name: str
    flops: float
    moved_bytes: float


def block_seconds(
    trace: BlockTrace, rates: ComputeRates, trained: bool, rows: int = 1, shorter: BlockTrace | None = None
) -> BlockSeconds:
    """Return the seconds of a block for a micro-batch.

    Args:
        trace: of one row.
        trained: whether its weights are trained, not only adapters.
        rows: rows of the micro-batch. What an operator does to weights does not grow with them.
        shorter: a trace of half of the row's tokens, which shows that part; None: everything grows.
    """
    works = _for_rows(trace, shorter, rows)
    return BlockSeconds(
        sum(_seconds(work, rates) for work in works),
        sum(_seconds(works[index], rates) for index in trace.required()),
        sum(_gradient(work, rates, trained) for work in works),
    )


def _for_rows(trace: BlockTrace, shorter: BlockTrace | None, rows: int) -> list[_Work]:
    if shorter is None or [call.name for call in shorter.operators] != [
        call.name for call in trace.operators
    ]:
        return [_Work(call.name, rows * call.flops, rows * call.moved_bytes) for call in trace.operators]
    return [
        _Work(
            call.name,
            _grown(call.flops, half.flops, rows),
            _grown(call.moved_bytes, half.moved_bytes, rows),
        )
        for call, half in zip(trace.operators, shorter.operators, strict=True)
    ]


def _grown(whole: float, half: float, rows: int) -> float:
    """Return the amount for ``rows`` rows, from those of one row and of half of its tokens."""
    constant = min(max(2 * half - whole, 0.0), whole)
    return constant + rows * (whole - constant)


def _is_attention(operator: _Work) -> bool:
    return "scaled_dot_product" in operator.name or operator.name == str(chunked.OPERATOR)


def _is_grouped(operator: _Work) -> bool:
    return "grouped_mm" in operator.name


def _seconds(operator: _Work, rates: ComputeRates) -> float:
    moved = _moved_seconds(operator, rates)
    if _is_attention(operator):  # operators count every pair of tokens, kernels compute half of them
        return max(operator.flops / 2 / rates.flash2.forward, moved)
    if not operator.flops:
        return moved
    return max(operator.flops / (rates.experts if _is_grouped(operator) else rates.dense), moved)


def _gradient(operator: _Work, rates: ComputeRates, trained: bool) -> float:
    if _is_attention(operator):
        return ATTENTION_BACKWARD * operator.flops / 2 / rates.flash2.backward
    if not operator.flops:
        return 2 * _moved_seconds(operator, rates)
    return (2 if trained else 1) * _seconds(operator, rates)


def _moved_seconds(operator: _Work, rates: ComputeRates) -> float:
    """Return the seconds of passes over memory; ``set_`` exchanges memory without one."""
    return 0.0 if operator.name.startswith("aten.set_.") else operator.moved_bytes / rates.memory
