"""Claim: on processors a compiler gains little from a block: matrix products and attention take most of its time.

Times a Llama block forward without gradients, and forward and backward, in eager mode and compiled by torch.compile,
in turns; says what part of eager's time matrix products and attention take, which a compiler leaves as they are.

    python scripts/bench_compile.py --dtype fp32 --rows 4 --tokens 512
"""

import statistics
import time
from collections.abc import Callable

import common.openmp  # noqa: F401

import click
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from common.hardware.machine import describe_machine

LAYERS = 4
"""Blocks that take turns, so that weights come from memory as in a run."""
LIBRARIES = ("aten::mm", "aten::addmm", "aten::bmm", "mkldnn", "flash_attention")
"""Parts of the names of operators that a compiler calls as eager mode does."""


class Block:
    """The blocks of a Llama, called forward, or forward and backward.

    Args:
        width: hidden size; the block has that of Llama's shape.
        shape: rows and tokens of the batch.
        dtype: of weights and activations.
    """

    def __init__(self, width: int, shape: tuple[int, int], dtype: torch.dtype):
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=width, intermediate_size=width * 11 // 4, num_hidden_layers=LAYERS,
            num_attention_heads=width // 64, vocab_size=256,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
        torch.nn.Module.to(model, dtype)
        self.blocks = model.model.layers
        self.hidden = torch.randn(*shape, width, dtype=dtype)  # [rows, tokens, width]
        self.gradient = torch.randn_like(self.hidden)
        self.positions = torch.arange(shape[1])[None]
        self.rotary = model.model.rotary_emb(self.hidden, self.positions)

    def eager(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return what block ``index`` makes of ``hidden``."""
        return self._call(self.blocks[index % LAYERS], hidden)

    def compiled(self) -> Callable[[int, torch.Tensor], torch.Tensor]:
        """Return :meth:`eager`, compiled once for all blocks."""
        call = torch.compile(self._call, dynamic=False)
        return lambda index, hidden: call(self.blocks[index % LAYERS], hidden)

    def _call(self, block: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        out = block(hidden, position_embeddings=self.rotary, position_ids=self.positions, attention_mask=None)
        return out if isinstance(out, torch.Tensor) else out[0]

    def forward(self, call: Callable[[int, torch.Tensor], torch.Tensor], index: int) -> None:
        """Run a forward pass as the engine's first one: nothing is kept."""
        with torch.no_grad():
            call(index, self.hidden)

    def backward(self, call: Callable[[int, torch.Tensor], torch.Tensor], index: int) -> None:
        """Run a forward pass again and the backward pass."""
        hidden = self.hidden.detach().requires_grad_()
        call(index, hidden).backward(self.gradient)
        self.blocks.zero_grad(set_to_none=True)


def part_of_libraries(block: Block) -> float:
    """Return what part of eager's time matrix products and attention take."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for index in range(3):
            block.forward(block.eager, index)
            block.backward(block.eager, index)
    times = [(event.key, event.self_cpu_time_total) for event in seen.key_averages()]
    inside = sum(took for name, took in times if any(part in name for part in LIBRARIES))
    return inside / sum(took for _, took in times)


@click.command()
@click.option("--dtype", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True)
@click.option("--width", default=1024, show_default=True)
@click.option("--rows", default=4, show_default=True)
@click.option("--tokens", default=512, show_default=True)
@click.option("--rounds", default=12, show_default=True)
@click.option("--threads", default=2, show_default=True)
def main(dtype: str, width: int, rows: int, tokens: int, rounds: int, threads: int) -> None:
    """Print times of both, in turns, and the bound of what a compiler could gain."""
    torch.set_num_threads(threads)
    block = Block(width, (rows, tokens), {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    compiled = block.compiled()
    for index in range(2):
        start = time.perf_counter()
        block.forward(compiled, index)
        block.backward(compiled, index)
        print(f"compiling, block {index}: {time.perf_counter() - start:.1f} s")

    ways = {
        (name, part): lambda index, run=run, call=call: run(call, index)
        for name, call in (("eager", block.eager), ("compiled", compiled))
        for part, run in (("forward", block.forward), ("with backward", block.backward))
    }
    times: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
    for index in range(rounds):
        for way, run in ways.items():
            start = time.perf_counter()
            run(index)
            times[way].append(time.perf_counter() - start)

    print(f"{describe_machine()}; {dtype}, width {width}, {rows} x {tokens} tokens, {threads} threads")
    middle = {way: statistics.median(took) for way, took in times.items()}
    for part in ("forward", "with backward"):
        eager, other = middle["eager", part], middle["compiled", part]
        print(
            f"{part:14} eager {eager * 1e3:7.1f} ms  compiled {other * 1e3:7.1f} ms  {eager / other:.2f} times as fast"
        )
    both = [sum(middle[name, part] for part in ("forward", "with backward")) for name in ("eager", "compiled")]
    inside = part_of_libraries(block)
    print(f"both {both[0] / both[1]:.2f}; products and attention {inside:.1%} of eager's: at most {1 / inside:.2f}")


if __name__ == "__main__":
    main()
