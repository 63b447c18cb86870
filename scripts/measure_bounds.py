"""Claim: host memory stays within --host-memory, and SSD traffic is what the plan says, however deep the model is.

Trains Llama-style models (hidden size 1024, 12.8 M parameters a block) of growing depth under one host budget and
prints states over budget, measured peak over budget, and bytes per parameter against the plan.

    python scripts/measure_bounds.py --ssd DIR --host-memory 400MiB --layers 5 --layers 21 --layers 54
    python scripts/measure_bounds.py --ssd DIR --host-memory 400MiB --layers 160 --lora-rank 16
    python scripts/measure_bounds.py --ssd DIR --host-memory 300MiB --layers 60 --lora-rank 16 --experts 64 \
        --device-memory 25MiB --rows 4

With adapters, what is compared with the budget are the frozen weights, and bytes are per frozen weight. With
``--experts``, models are Qwen3's mixtures (hidden size 512, 0.79 M parameters an expert and block, 8 of them active),
and ``--device-memory`` can be less than a block, which is in pieces then.
"""

import tempfile

import click
import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen3MoeConfig, logging

import fuyou
from common.models.adapters.options import AdapterOptions
from common.units import format_bytes, format_count, parse_bytes


def llama(layers: int) -> PreTrainedConfig:
    """Return a dense model of this depth."""
    return LlamaConfig(
        vocab_size=4096, hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers, num_attention_heads=16,
        tie_word_embeddings=False,
    )  # fmt: skip


def mixture(layers: int, experts: int) -> PreTrainedConfig:
    """Return a mixture of experts of this depth."""
    return Qwen3MoeConfig(
        vocab_size=4096, hidden_size=512, intermediate_size=512, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=8, moe_intermediate_size=512, num_experts=experts, num_experts_per_tok=8,
        tie_word_embeddings=False,
    )  # fmt: skip


@click.command()
@click.option("--ssd", default=tempfile.gettempdir(), type=click.Path(exists=True, file_okay=False))
@click.option("--host-memory", default="400MiB")
@click.option("--layers", multiple=True, type=int, default=(5, 21, 54))
@click.option("--steps", default=3)
@click.option("--seq-len", default=128)
@click.option("--lora-rank", type=int)
@click.option("--frozen-dtype", type=click.Choice(["int8", "nf4"]))
@click.option("--experts", type=int)
@click.option("--device-memory")
@click.option("--lora-targets", multiple=True, default=["all-linear"])
@click.option("--rows", default=1)
@click.option("--dtype", type=click.Choice(["bf16", "fp32"]), default="bf16")
def main(
    ssd: str,
    host_memory: str,
    layers: tuple[int, ...],
    steps: int,
    seq_len: int,
    lora_rank: int | None,
    frozen_dtype: str | None,
    experts: int | None,
    device_memory: str | None,
    lora_targets: tuple[str, ...],
    rows: int,
    dtype: str,
) -> None:
    """Measure memory and traffic at several depths."""
    logging.set_verbosity_error()
    limit = parse_bytes(host_memory)
    adapters = None if lora_rank is None else AdapterOptions(lora_rank, targets=tuple(lora_targets))
    print(f"{'layers':>6} {'parameters':>10} {'states':>9} {'/budget':>8} {'peak':>9} {'of budget':>9}"
          f" {'read':>6} {'plan':>6} {'written':>7} {'plan':>6} {'s/step':>7}")  # fmt: skip
    for depth in layers:
        config = llama(depth) if experts is None else mixture(depth, experts)
        with (
            tempfile.TemporaryDirectory(dir=ssd) as directory,
            fuyou.Engine(
                config,
                dtype=dtype,
                ssd=[directory],
                host_memory=limit,
                device_memory=None if device_memory is None else parse_bytes(device_memory),
                batch_shape=(rows, seq_len),
                adapters=adapters,
                frozen_dtype=frozen_dtype,
            ) as engine,
        ):
            seconds = []
            for _ in range(steps):
                tokens = torch.randint(0, config.vocab_size, (rows, seq_len))
                engine(input_ids=tokens, labels=tokens).loss.backward()
                seconds.append(engine.step().seconds)
            engine.flush()
            weights = engine.parameters - engine.trainable_parameters
            states = 12 * engine.parameters if adapters is None else 2 * weights
            used = engine.host_peak_bytes - engine.host_baseline_bytes
            per = [
                count / steps / (weights or engine.parameters)
                for count in (*engine.io_bytes(), *engine.planned_io_bytes())
            ]
            print(f"{depth:>6} {format_count(engine.parameters):>10} {format_bytes(states):>9} {states / limit:>7.1f}x"
                  f" {format_bytes(used):>9} {used / limit:>9.2f}"
                  f" {per[0]:>6.2f} {per[2]:>6.2f} {per[1]:>7.2f} {per[3]:>6.2f}"
                  f" {sorted(seconds)[len(seconds) // 2]:>7.1f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
