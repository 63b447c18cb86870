"""What a first day needs: a small checkpoint, one that lacks a tensor, and the same few texts in every format."""

import csv
import gzip
import json
from pathlib import Path
from typing import Any

VOCAB, CONTEXT = 1024, 512


def make_materials(work: Path) -> None:
    """Make ``models`` and ``data`` in a directory."""
    _make_checkpoints(work / "models")
    _make_data(work / "data")


def _make_checkpoints(folder: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    from common.data.demo_text import train_demo_tokenizer

    logging.disable_progress_bar()
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    for name in ("small", "lacking"):
        LlamaForCausalLM(config).save_pretrained(folder / name)
        train_demo_tokenizer(VOCAB, folder / name)
    weights = load_file(folder / "lacking" / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "lacking" / "model.safetensors", {"format": "pt"})


def _lines(records: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def _make_data(folder: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    folder.mkdir()
    texts = [{"text": f"Document {number} counts to {number * number}. " * 4} for number in range(40)]
    asked = [(f"What is {number} plus {number}?", f"{number + number}.") for number in range(20)]
    (folder / "texts.jsonl").write_text(_lines(texts))
    (folder / "texts.jsonl.gz").write_bytes(gzip.compress(_lines(texts).encode()))
    (folder / "book.txt").write_text("\n".join(text["text"] for text in texts))
    datasets.Dataset.from_list(texts).save_to_disk(folder / "saved")
    (folder / "questions.jsonl").write_text(_lines([{"question": one, "answer": other} for one, other in asked]))
    with (folder / "alpaca.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["instruction", "input", "output"])
        table.writerows([question, "", answer] for question, answer in asked)
    turns = [{"from": "human", "value": "What is the capital of France?"}, {"from": "gpt", "value": "Paris."}]
    (folder / "sharegpt.jsonl").write_text(_lines([{"conversations": turns, "system": "Be brief."}] * 3))
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    messages = [
        {"role": "user", "content": "Rome?"}, {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "warm"}, {"role": "assistant", "content": "Warm."},
    ]  # fmt: skip
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    (folder / "tools.jsonl").write_text(_lines([{"messages": messages, "tools": tools}] * 3))
    (folder / "broken.jsonl").write_text('{"text": "whole"}\n{"text": \n')
