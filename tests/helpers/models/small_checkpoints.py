"""Checkpoints of small models with a tokenizer, for tests of trainers."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from common.data.demo_text import train_demo_tokenizer

TOKENS = {"vocab_size": 384, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {
    **TOKENS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def small_checkpoint(
    folder: Path, config: PreTrainedConfig | None = None, model: Any = AutoModelForCausalLM
) -> Path:
    """Write a model with random weights, by default a Llama, and a tokenizer of its vocabulary."""
    torch.manual_seed(0)
    model.from_config(config or LlamaConfig(**SIZES)).save_pretrained(folder)
    train_demo_tokenizer(TOKENS["vocab_size"], folder)
    return folder
