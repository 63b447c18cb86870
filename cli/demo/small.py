"""The small model of the demonstration: random weights and text from Python itself, without a network."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.randomness import own_random_numbers

PROMPT = "The module provides"


@dataclass(frozen=True)
class DemoSize:
    """Sizes of the demonstration."""

    hidden: int = 320
    layers: int = 16
    vocab: int = 4096
    host_memory: int = 176 << 20  # Host memory that the run may take; 120 MiB of it are a fixed allowance
    steps: int = 16
    batch_size: int = 4
    seq_len: int = 64
    lr: float = 1e-3
    new_tokens: int = 24


def write_checkpoint(directory: Path, size: DemoSize) -> None:
    """Write a Llama in miniature with a byte-pair tokenizer, as any checkpoint from a hub looks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from common.data.demo_text import train_demo_tokenizer

    config = LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.hidden * 8 // 3 // 32 * 32,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 64,
        num_key_value_heads=size.hidden // 64,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with own_random_numbers(0):
        model = LlamaForCausalLM(config)
    model.save_pretrained(directory)
    train_demo_tokenizer(size.vocab, directory)


def write_data(file: Path) -> None:
    """Write English text from Python itself, a document a line, as ``--data`` takes it."""
    from common.data.demo_text import demo_documents

    with file.open("w") as out:
        for text in demo_documents():
            # Without the line breaks of a terminal 80 columns wide, which are all that a short run would learn.
            out.write(json.dumps({"text": " ".join(text.split())}) + "\n")


def complete(directory: Path, new_tokens: int) -> str:
    """Return a sentence that a model completes, sampled."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad(), own_random_numbers(0):
        tokens = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=new_tokens,
            do_sample=True,
            top_k=40,
        )
    return repr(str(tokenizer.decode(tokens[0], skip_special_tokens=True)))
