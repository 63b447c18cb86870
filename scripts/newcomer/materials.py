"""What newcomers need: a small checkpoint, and the same few texts in every format, right and wrong."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from common.data.demo_text import train_demo_tokenizer


def make_materials(work: Path) -> None:
    """Make ``models`` and ``data`` in a directory."""
    logging.disable_progress_bar()
    _make_data(work / "data")
    folder = work / "models" / "small"
    config = LlamaConfig(
        vocab_size=1024, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    train_demo_tokenizer(1024, folder)


def _lines(records: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def _make_data(folder: Path) -> None:
    folder.mkdir()
    texts = [{"text": f"Document {number} counts to {number * number}. " * 4} for number in range(40)]
    asked = [(f"What is {number} plus {number}?", f"{number + number}.") for number in range(20)]
    (folder / "texts.jsonl").write_text(_lines(texts))
    (folder / "questions.jsonl").write_text(
        _lines([{"question": question, "answer": answer} for question, answer in asked])
    )
    (folder / "table.csv").write_text(
        "q,a\n" + "".join(f"{question},{answer}\n" for question, answer in asked)
    )
    turns = [{"from": "human", "value": "What is the capital of France?"}, {"from": "gpt", "value": "Paris."}]
    (folder / "sharegpt.jsonl").write_text(_lines([{"conversations": turns, "system": "Be brief."}] * 3))
    (folder / "broken.jsonl").write_text('{"text": "whole"}\n{"text": \n')
    (folder / "empty.jsonl").write_text("")
    pairs = [
        {"prompt": question, "chosen": answer, "rejected": "I do not know."} for question, answer in asked
    ]
    (folder / "pairs.jsonl").write_text(_lines(pairs))
