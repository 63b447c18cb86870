"""Measure the model's parts on the device: matrix products, embedding, block, and head.

One block of the model runs with random weights, as the engine's tasks run it.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig

from common.models.meta_model import build_meta_model
from fuyou.layout.model_layout import ModelLayout
from fuyou.layout.record import Precision, Record
from fuyou.model.blocks.calls import BlockCalls
from fuyou.model.loss.cross_entropy import cross_entropy
from fuyou.model.loss.router_loss import switch_router_logits
from fuyou.model.model_records import model_records
from fuyou.model.recompute.replay import BlockReplay, SavedForward
from fuyou.model.streamed_model import StreamedModel
from fuyou.optimizer.gradient_sum import GradientSum, sum_of_squares
from fuyou.runtime.device import Device

LONGEST_PASS_SECONDS = 0.4  # If a pass is expected to take longer, fewer tokens are measured
REPEAT_SECONDS = 0.4  # Repetitions of one piece of work end after this many seconds
_MAX_REPETITIONS = 7
_TILE_ELEMENTS = 1 << 20


def streamed_layout(
    config: PreTrainedConfig, precision: Precision, device: torch.device
) -> tuple[StreamedModel, ModelLayout]:
    """Return a model to measure, without weights, and its records."""
    model = build_meta_model(config, dtype=precision.dtype)
    switch_router_logits(model, False)  # which the model itself would look for
    stack = StreamedModel(model, device)
    return stack, model_records(stack, precision)


class BlockBench:
    """The largest block of a model and the parts outside its blocks, with random weights, ready to be measured.

    Args:
        rows, seq_len: shape of the micro-batch.
        head_columns: tokens of each row that go through the head at once.
    """

    def __init__(
        self,
        stack: StreamedModel,
        layout: ModelLayout,
        device: Device,
        rows: int,
        seq_len: int,
        head_columns: int,
    ):
        self._stack = stack
        self._layout = layout
        self._device = device
        self._dtype = layout.precision.dtype
        self._layer = layout.largest_block
        (index,) = layout.blocks[self._layer]  # in one piece: it is measured as a whole
        self._record = layout.records[index]
        self._whole = rows, seq_len
        self._head_columns = min(head_columns, seq_len)
        self._head_tokens = rows * self._head_columns
        self.matmul_flops_per_second = self._matmul_rate(rows * seq_len)
        expected = 8.0 * self._record.active_count / self.matmul_flops_per_second
        self.rows, self.seq_len = _shortened(rows, seq_len, LONGEST_PASS_SECONDS / expected)
        self._scale = rows * seq_len / (self.rows * self.seq_len)
        self._weights = random_values(self._record.numel, self._dtype, device.torch_device)
        self._gradient = torch.empty_like(self._weights)

    def measure(self) -> dict[str, Any]:
        """Measure everything, on fewer tokens if a pass takes too long, and then on a quarter of them.

        Returns the fields of a profile that say how long the parts of a micro-batch take.
        """
        sizes = [self.seq_len] if self._scale == 1 else [self.seq_len, max(1, self.seq_len // 4)]
        samples = [self._sample(seq_len) for seq_len in sizes]
        calls = -(-self._whole[1] // self._head_columns)
        seconds = {}
        for name in samples[0]:
            at_once, times = (
                (self._head_tokens, calls) if "head" in name else (self._whole[0] * self._whole[1], 1)
            )
            seconds[name] = times * _extrapolated([sample[name] for sample in samples], at_once)
        return {
            **seconds,
            "measured_tokens": self.rows * self.seq_len,
            "matmul_flops_per_second": self.matmul_flops_per_second,
            "block_finish_seconds": self.seconds(lambda: sum_of_squares(self._gradient)),
        }

    def _sample(self, seq_len: int) -> dict[str, tuple[int, float]]:
        """Return the tokens that pass through each part, fewer through the head, and their seconds."""
        hidden, calls, embed = self.embedding(seq_len)
        embed_forward, embed_backward = (self.seconds(work) for work in embed)
        run_forward, run_backward = self.block(calls, hidden)
        run_forward()
        run_backward()  # the first one is traced; from the next pass on it takes short cuts
        forward = self.seconds(run_forward)
        backward = self.seconds(run_backward)
        columns = min(seq_len, self._head_tokens // self.rows)
        head, head_forward = self._head(hidden.narrow(self._stack.token_dim, 0, columns).detach())
        tokens = self.rows * seq_len
        head_tokens = self.rows * columns
        return {
            "embed_forward_seconds": (tokens, embed_forward),
            "block_forward_seconds": (tokens, forward),
            "block_backward_seconds": (tokens, backward),
            "head_seconds": (head_tokens, head),
            "head_forward_seconds": (head_tokens, head_forward),
            "embed_backward_seconds": (tokens, embed_backward),
        }

    def block(self, calls: BlockCalls, hidden: torch.Tensor) -> tuple[Callable[[], None], Callable[[], None]]:
        """Return functions that run the block's forward pass, and its backward pass with recomputation."""
        views = self._record.views(self._weights)
        output, upstream = torch.empty_like(hidden), torch.full_like(hidden, 1e-3)
        replay, saved = BlockReplay(), SavedForward((self._layer, calls.describe(self._layer)), None)

        def run(hidden: torch.Tensor) -> torch.Tensor:
            return self._stack.block(self._layer, hidden, calls)

        def forward() -> None:
            nonlocal saved
            with torch.no_grad(), self._stack.bound(_named(self._record, views)):
                result, saved = replay.forward(self._layer, calls, lambda: run(hidden), None)
            output.copy_(result)

        def backward() -> None:
            leaf = hidden.detach().requires_grad_()
            with torch.enable_grad(), self._stack.bound(self._leaves(self._record, views, self._gradient)):
                result, _ = replay.backward(self._layer, calls, lambda: run(leaf), None, saved)
                calls.backward(result, upstream)
            assert leaf.grad is not None
            output.copy_(leaf.grad)

        return forward, backward

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the median seconds of a few runs of ``work``, after one warm-up."""
        work()
        self._device.synchronize()
        times: list[float] = []
        while sum(times) < REPEAT_SECONDS and len(times) < _MAX_REPETITIONS:
            start = time.perf_counter()
            work()
            self._device.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    # -- parts ----------------------------------------------------------------------------------------------------

    def _matmul_rate(self, tokens: int) -> float:
        rows = min(tokens, 256 if self._device.torch_device.type == "cpu" else 4096)
        flops = total = 0.0
        for (outputs, inputs), times in Counter(
            tuple(slot.shape[-2:]) for slot in self._record.parameters if len(slot.shape) > 1
        ).items():
            source = random_values(rows * inputs, self._dtype, self._device.torch_device).view(rows, inputs)
            weight = random_values(outputs * inputs, self._dtype, self._device.torch_device).view(
                outputs, inputs
            )
            seconds = self.seconds(partial(torch.nn.functional.linear, source, weight))
            flops += times * 2.0 * rows * outputs * inputs
            total += times * seconds
        return flops / total

    def _inputs(self, seq_len: int) -> dict[str, torch.Tensor]:
        vocabulary = self._stack.model.config.get_text_config().vocab_size
        tokens = torch.arange(self.rows * seq_len, device=self._device.torch_device) % vocabulary
        return {"input_ids": tokens.view(self.rows, seq_len)}

    def embedding(self, seq_len: int) -> tuple[torch.Tensor, BlockCalls, tuple[Callable[[], object], ...]]:
        """Return the blocks' input, their other arguments, and functions for the embedding's passes."""
        record = self._layout.records[self._layout.embedding]
        weights = random_values(record.numel, self._dtype, self._device.torch_device)
        gradient, views, inputs = torch.empty_like(weights), record.views(weights), self._inputs(seq_len)

        @torch.no_grad()
        def forward(alone: bool = False) -> tuple[torch.Tensor, BlockCalls]:
            with self._stack.bound(_named(record, views), before=True):
                return self._stack.embed_with_zero_links(inputs) if alone else self._stack.embed(inputs)

        def backward() -> None:
            with torch.enable_grad(), self._stack.bound(self._leaves(record, views, gradient), before=True):
                hidden, _ = self._stack.embed(inputs)
                if hidden.requires_grad:
                    torch.autograd.backward(hidden, torch.full_like(hidden, 1e-3))

        hidden, calls = forward(alone=True)  # one block is measured, without those that hand it something
        return hidden.clone(), calls, (forward, backward)

    def _head(self, hidden: torch.Tensor) -> tuple[float, float]:
        record = self._layout.records[self._layout.head]
        weights = random_values(record.numel, self._dtype, self._device.torch_device)
        gradient, views = torch.empty_like(weights), record.views(weights)
        inputs = self._inputs(hidden.shape[self._stack.token_dim])
        targets = inputs["input_ids"]
        items = torch.tensor(targets.numel(), device=self._device.torch_device)

        def both() -> None:
            leaf = hidden.clone().requires_grad_()
            with torch.enable_grad(), self._stack.bound(self._leaves(record, views, gradient), before=False):
                logits = self._stack.head(inputs, leaf)
                torch.autograd.backward(logits, cross_entropy(logits, targets, items, gradient=True)[1])

        def forward() -> None:
            with torch.no_grad(), self._stack.bound(_named(record, views), before=False):
                cross_entropy(self._stack.head(inputs, hidden), targets, items, gradient=False)

        return self.seconds(both), self.seconds(forward)

    def _leaves(
        self, record: Record, views: dict[str, torch.Tensor], sums: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        leaves: dict[str, torch.Tensor] = {name: torch.nn.Parameter(view) for name, view in views.items()}
        GradientSum(record, sums).attach(leaves)
        return _named(record, leaves)


def random_values(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return small random numbers ``[count]``: one tile repeated, because drawing a billion takes too long."""
    tile = torch.randn(min(count, _TILE_ELEMENTS), generator=torch.Generator().manual_seed(0)) * 0.02
    tile = tile.to(dtype).to(device)
    values = torch.empty(count, dtype=dtype, device=device)
    for start in range(0, count, _TILE_ELEMENTS):
        part = values[start : start + _TILE_ELEMENTS]
        part.copy_(tile[: part.numel()])
    return values


def _extrapolated(points: list[tuple[int, float]], tokens: int) -> float:
    """Return the seconds for ``tokens`` from samples of as many or fewer; the fixed cost of a pass is not scaled."""
    (most, longest), *rest = points
    if not rest or rest[0][0] == most:
        return longest * tokens / most
    fewer, shorter = rest[0]
    slope = (longest - shorter) / (most - fewer)
    return longest + max(0.0, min(slope, longest / most)) * (tokens - most)


def _shortened(rows: int, seq_len: int, tokens: float) -> tuple[int, int]:
    """Return a micro-batch of at most ``tokens`` tokens, with whole sequences if one fits."""
    if tokens >= rows * seq_len:
        return rows, seq_len
    if tokens >= seq_len:
        return int(tokens) // seq_len, seq_len
    return 1, max(1, min(seq_len, max(16, int(tokens))))


def _named(record: Record, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: values[slot.name] for slot in record.parameters for name in slot.names}
