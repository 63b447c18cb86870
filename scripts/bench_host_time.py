"""Host time of the engine per block visit, next to a plain loop that checkpoints each block.

    python scripts/bench_host_time.py --store DIR

Tensors are so small that only the host's work is left, on one thread of the CPU: what a GPU would wait for. Times are
processor milliseconds of the main thread per block, medians over steps, which the engine and the plain loop take
alternately. Embedding, head, and loss are included.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import fuyou

BLOCKS = 12
CONFIG: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": BLOCKS, "max_position_embeddings": 64,
}  # fmt: skip
WARM_STEPS = 4


def _lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules="all-linear")


def _timed(forward: Callable[[], Any], end: Callable[[], Any]) -> tuple[float, float]:
    begun = time.thread_time()
    loss = forward()
    middle = time.thread_time()
    loss.backward()
    ended = time.thread_time()
    end()
    return middle - begun, ended - middle


def measure(store: Path, lora: bool, steps: int) -> dict[tuple[str, str], float]:
    """Return the milliseconds per block by loop and pass."""
    tokens = torch.randint(0, CONFIG["vocab_size"], (1, 16))
    plain: Any = LlamaForCausalLM(LlamaConfig(**CONFIG)).train()
    plain.gradient_checkpointing_enable({"use_reentrant": False})
    if lora:
        plain = get_peft_model(plain, _lora())
    times: dict[tuple[str, str], list[float]] = {}
    with fuyou.Engine(
        LlamaConfig(**CONFIG), ssd=[str(store)], device="cpu", dtype="fp32", lr=1e-3, host_memory="500MiB",
        batch_shape=(1, 16), overwrite=True, prove=False, micro_batch=1, adapters=_lora() if lora else None,
    ) as engine:  # fmt: skip
        loops: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
            "engine": (lambda: engine(input_ids=tokens, labels=tokens).loss, engine.step),
            "plain": (lambda: plain(input_ids=tokens, labels=tokens, use_cache=False).loss, plain.zero_grad),
        }
        for step in range(WARM_STEPS + steps):
            for name, loop in loops.items():
                forward, backward = _timed(*loop)
                if step >= WARM_STEPS:
                    times.setdefault((name, "forward"), []).append(forward)
                    times.setdefault((name, "backward"), []).append(backward)
    return {kind: 1e3 * statistics.median(values) / BLOCKS for kind, values in times.items()}


@click.command(help=__doc__)
@click.option(
    "--store", type=click.Path(path_type=Path), required=True, help="Folder for the engine's files."
)
@click.option("--steps", default=60, show_default=True)
def main(store: Path, steps: int) -> None:
    torch.set_num_threads(1)
    print("| trained | pass | engine, ms | plain, ms | ratio |\n|---|---|---|---|---|")
    for lora in (False, True):
        times = measure(store, lora, steps)
        for part in ("forward", "backward"):
            engine, plain = times["engine", part], times["plain", part]
            kind = "LoRA" if lora else "full"
            print(f"| {kind} | {part} | {engine:.2f} | {plain:.2f} | {engine / plain:.2f} |", flush=True)


if __name__ == "__main__":
    main()
