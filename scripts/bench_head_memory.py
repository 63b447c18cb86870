#!/usr/bin/env python
"""Measure the memory of a loss over log-probabilities with a large vocabulary, against the plan and the budget.

One step of a small model with a vocabulary of 150,000 tokens, on a batch of 64 x 1,024: its logits would take 39 GB in
fp32, and their gradient as much again. It takes three minutes on a thread of a CPU, fewer with fewer rows.

    python scripts/bench_head_memory.py --host-memory 2GiB --rows 6
"""

import argparse
import json
import tempfile
import time

import torch
from transformers import LlamaConfig

import fuyou
from common.units import parse_bytes


def main() -> None:
    """Print what was planned and what was measured, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host-memory", default="2GiB")
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=8)
    parser.add_argument("--outputs", nargs="+", default=["log_probs"])
    options = parser.parse_args()
    config = LlamaConfig(
        vocab_size=options.vocabulary, hidden_size=options.hidden, intermediate_size=2 * options.hidden,
        num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=options.seq_len,
    )  # fmt: skip
    shape, outputs = (options.rows, options.seq_len), tuple(options.outputs)
    with (
        tempfile.TemporaryDirectory(dir=".") as folder,
        fuyou.Engine(
            config, ssd=[folder], device="cpu", dtype="fp32", host_memory=options.host_memory, batch_shape=shape,
            token_outputs=len(outputs),
        ) as engine,
    ):  # fmt: skip
        ids = torch.randint(0, options.vocabulary, shape)
        start_time = time.perf_counter()
        out = engine.tokens(input_ids=ids, outputs=outputs)
        loss = -torch.nn.functional.logsigmoid(out.log_probs.sum(1)[::2] - out.log_probs.sum(1)[1::2]).mean()
        engine.backward(loss)
        engine.step()
        engine.flush()
        plan = engine.memory_plan
        found = {
            "logits_bytes": 4 * options.vocabulary * options.rows * options.seq_len,
            "budget_bytes": parse_bytes(options.host_memory),
            "planned_bytes": plan.host_bytes,
            "peak_bytes": engine.host_peak_bytes - engine.host_baseline_bytes,
            "micro_rows": plan.batch.micro_rows,
            "head_columns": plan.head_columns,
            "seconds": round(time.perf_counter() - start_time, 1),
        }
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
