"""Plans which operator outputs a forward pass saves for the backward pass; needs no device.

A block's input is always saved, and the rest of its forward pass is computed again. Saving an output beyond that saves
computing it and what only it is made from, and costs its bytes on the way out and back. Fuyou's swap benefit factor
(equation 12: FLOPs over swap time, by a table of a GPT's four linear layers) is taken here from the operators that a
block of any model runs, and from what a recomputation needs anyway: leaving out a result that the backward pass never
reads costs nothing.
"""

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from weakref import WeakKeyDictionary

import numpy as np
import torch

from common.errors import UserError
from common.randomness import own_random_numbers
from fuyou.layout.model_layout import Recomputation, evenly_spaced
from fuyou.model.blocks.weightless import on_meta
from fuyou.model.chunk_survey import chunk_flops
from fuyou.model.recompute.block_trace import AttentionOf, BlockTrace, Tracer
from fuyou.model.streamed_model import StreamedModel

FLOPS_PER_BYTE = 160.0
"""FLOPs that a device does while it moves one byte of its memory, for operators that are bound by that: about 160 on an
RTX 4090 (165 TFLOP/s in bf16, 1008 GB/s) and on an A100 (312 TFLOP/s, 1.9 TB/s)."""

MAX_CANDIDATES = 256
"""Largest number of operators to choose from; among more nothing is saved. The time that choosing takes grows with the
cube of their number. Blocks have some tens; those that loop over tokens in Python (RWKV's) have thousands, none of
which is worth much."""

_TRACES: WeakKeyDictionary[StreamedModel, dict[tuple[int, str, torch.dtype], BlockTrace | None]] = (
    WeakKeyDictionary()
)


@dataclass(frozen=True)
class SavableOutput:
    """The outputs of one operator call of a block, for one micro-batch, and what saving them is worth.

    All outputs of a call (attention and its log-sum-exp) are saved, or none.
    """

    operator: str  # Name of the operator, such as ``aten.addmm.default``
    ordinal: int  # Number of the call among the block's calls of that operator, from 0
    nbytes: int  # Bytes of all outputs
    # FLOPs that a recomputation saves if it is saved with everything before it in the list
    saved_flops: float


@dataclass(frozen=True)
class SavedOutputs:
    """The operator calls of a block whose outputs are saved, for one micro-batch."""

    operators: tuple[tuple[str, int], ...]  # Name and ordinal of each call
    nbytes: int  # Bytes of one layer and micro-batch
    saved_fraction: float  # Fraction of the recomputation's FLOPs that is left out


def savable_outputs(trace: BlockTrace, rows: int = 1) -> list[SavableOutput]:
    """Return the outputs of a block that are worth saving, best first.

    Greedy: again and again the call that saves the most per byte, given those before it; of equal ones, the one that
    saves more calls. What several outputs save only together is counted with the last of them.

    Args:
        trace: the block's operators on one row.
        rows: rows in a micro-batch; everything is proportional to it.
    """
    # FLOPs of each call, or those that a GPU could do while it moves the call's bytes, if more.
    costs = [max(operator.flops, FLOPS_PER_BYTE * operator.moved_bytes) for operator in trace.operators]
    needed = trace.required()
    candidates = {
        index for index in needed if trace.operators[index].savable and trace.operators[index].nbytes
    }
    if len(candidates) > MAX_CANDIDATES:
        candidates = set()
    given: frozenset[int] = frozenset()
    chosen: list[SavableOutput] = []
    while True:
        best = -1
        best_rank = (0.0, len(needed))
        best_needed = needed
        total = sum(costs[index] for index in needed)
        for index in sorted(candidates & needed):
            left = trace.required(given | {index})
            benefit = (total - sum(costs[other] for other in left)) / trace.operators[index].nbytes
            rank = (benefit, len(needed) - len(left))
            if rank > best_rank:
                best = index
                best_rank = rank
                best_needed = left
        if best < 0:
            break
        operator = trace.operators[best]
        saved = trace.flops(needed - best_needed)
        chosen.append(SavableOutput(operator.name, operator.ordinal, rows * operator.nbytes, rows * saved))
        given = given | {best}
        needed = best_needed
    return chosen


def best_fitting(outputs: Sequence[SavableOutput], nbytes: float) -> list[tuple[str, int]]:
    """Return name and ordinal of the first of ``outputs``, as many as fit into ``nbytes``."""
    totals = accumulate(output.nbytes for output in outputs)
    fitting = takewhile(lambda item: item[1] <= nbytes, zip(outputs, totals, strict=True))
    return [(output.operator, output.ordinal) for output, _ in fitting]


def trace_block(stack: StreamedModel, seq_len: int, device: str, dtype: torch.dtype) -> BlockTrace | None:
    """Trace the last block's forward pass of one row on the meta device (where families mix kinds of blocks, it sees
    the whole sequence).

    It takes no weights, no device and, after the first time for this model, no time.

    Args:
        stack: the model.
        seq_len: tokens in the row.
        device: ``"cpu"`` or ``"cuda"``, whose attention kernel the trace has.
        dtype: type of the hidden states.

    Returns:
        The trace; None if the family's code needs values to run.
    """
    traced = _TRACES.setdefault(stack, {})
    kind = (seq_len, device, dtype)
    if kind not in traced:
        traced[kind] = None
        # A family's code may fail in any way. A resumed run continues with the random numbers that it stopped at.
        with contextlib.suppress(Exception), own_random_numbers():
            calls = stack.calls_on_meta(seq_len)
            block = stack.blocks[-1]
            args, kwargs = calls.arguments[-1]
            hidden = torch.empty(calls.hidden_shape, dtype=dtype, device="meta", requires_grad=True)
            with on_meta(block), torch.enable_grad(), AttentionOf(device, stack.kernels), Tracer() as tracer:
                result = block(hidden, *args, **kwargs)
            traced[kind] = tracer.finish(result if isinstance(result, torch.Tensor) else result[0])
    return traced[kind]


def chunk_attention_flops(stack: StreamedModel, seq_len: int, chunk: int) -> list[float]:
    """Return, for each chunk of a row, the FLOPs of a block's forward pass that the first chunk does not have: those in
    which it attends to the chunks before it; on average over blocks.

    They are counted for four chunks without weights or a device, and lie on lines between these. Half of what operators
    report: where attention is causal, they count every pair of tokens twice, as they do for whole rows.
    """
    starts = list(range(0, seq_len, chunk))
    counted = sorted({0, min(1, len(starts) - 1), len(starts) // 2, len(starts) - 1})
    flops = [chunk_flops(stack, starts[number], seq_len, chunk) for number in counted]
    return [(float(each) - flops[0]) / 2 for each in np.interp(range(len(starts)), counted, flops)]


def saved_outputs(trace: BlockTrace, operators: Collection[tuple[str, int]], rows: int = 1) -> SavedOutputs:
    """Return what saving the outputs of these calls costs and saves.

    Raises:
        UserError: the block makes no such call, or its outputs cannot be saved.
    """
    indices = []
    for name, ordinal in operators:
        index = trace.find(name, ordinal)
        if index is None or not trace.operators[index].savable:
            raise UserError(
                f"A block of this model has no outputs of {name} (call {ordinal}) that could be kept."
            )
        indices.append(index)
    nbytes = sum(trace.operators[index].nbytes for index in indices)
    return SavedOutputs(tuple(operators), rows * nbytes, trace.left_out(frozenset(indices)))


@dataclass(frozen=True)
class ActivationPolicy:
    """The activations that a run saves beyond block inputs: outputs of some operators, in some of the blocks."""

    # Name and ordinal of each call, as :class:`SavableOutput` has them
    operators: tuple[tuple[str, int], ...]
    layers: int  # Number of blocks that save them


class ActivationPlanner:
    """Plans which outputs a run saves, for any batch, and what that saves.

    Args:
        stack: the model.
        device: ``"cpu"`` or ``"cuda"``, as :func:`trace_block` has it.
        dtype: type of the hidden states.
        policy: the operators and the number of layers; or a number of bytes, into which the best outputs of every layer
            and micro-batch must fit.
    """

    def __init__(self, stack: StreamedModel, device: str, dtype: torch.dtype, policy: ActivationPolicy | int):
        self._stack = stack
        self._device = device
        self._dtype = dtype
        self._policy = policy
        self._known: dict[tuple[int, int], SavedOutputs] = {}  # By rows and length
        layers = len(stack.blocks)
        count = policy.layers if isinstance(policy, ActivationPolicy) else layers if policy else 0
        if not 0 <= count <= layers:
            raise UserError(f"Outputs cannot be kept in {count} blocks: this model has {layers}.")
        self.layers = evenly_spaced(range(layers), count)
        """The blocks that save outputs, evenly spaced, so that the traffic is even, too. (Simulated, 13B with a quarter
        to half of the blocks saving much: up to 4% shorter steps than with the last blocks.)"""

    def saved(self, rows: int, seq_len: int) -> SavedOutputs:
        """Return what one layer saves for a micro-batch of ``rows`` x ``seq_len`` tokens.

        Raises:
            UserError: no outputs of this model can be saved.
        """
        if (rows, seq_len) not in self._known:
            self._known[rows, seq_len] = self._saved(rows, seq_len)
        return self._known[rows, seq_len]

    def _saved(self, rows: int, seq_len: int) -> SavedOutputs:
        trace = self._trace(seq_len)
        policy = self._policy
        if trace is None:
            return SavedOutputs((), 0, 0.0)
        if isinstance(policy, ActivationPolicy):
            return saved_outputs(trace, policy.operators, rows)
        return saved_outputs(
            trace, best_fitting(savable_outputs(trace, rows), policy) if policy else (), rows
        )

    def recomputation(self, rows: int, seq_len: int) -> Recomputation:
        """Return how much of a block is computed again, as the schedule needs to know it."""
        trace = self._trace(seq_len)
        saved = self.saved(rows, seq_len)
        unneeded = saved_outputs(trace, ()).saved_fraction if trace is not None else 0.0
        return Recomputation(frozenset(self.layers if saved.nbytes else ()), saved.saved_fraction, unneeded)

    def _trace(self, seq_len: int) -> BlockTrace | None:
        trace = trace_block(self._stack, seq_len, self._device, self._dtype)
        if trace is None and self.layers:
            raise UserError(
                f"Which outputs of {type(self._stack.model).__name__} to keep cannot be planned: its blocks do not run "
                "without values. Leave saved_activations out."
            )
        return trace
