"""A small vision-language checkpoint with its processor, and conversations with images to train it on."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.common.data.processors import chat, draw, make_processor, write
from tests.helpers.models.vision_families import FAMILIES


def image_checkpoint(folder: Path) -> Path:
    """Write a Gemma 3 with random weights."""
    processor = make_processor()
    tokens = {name: processor.tokenizer.convert_tokens_to_ids(f"<{name}>") for name in ("img", "boi", "eoi")}
    family = FAMILIES["gemma3"]
    config = AutoConfig.for_model(
        "gemma3", **family
        | {"image_token_index": tokens["img"], "image_token_id": tokens["img"], "boi_token_index": tokens["boi"],
           "eoi_token_index": tokens["eoi"], "text_config": family["text_config"] | {"vocab_size": 340}},
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def image_data(folder: Path) -> Path:
    """Write four conversations about an image each."""
    records = []
    for number in range(4):
        draw(folder / f"{number}.png", number)
        question = [
            {"type": "image", "path": f"{number}.png"},
            {"type": "text", "text": "What is the capital?"},
        ]
        records.append(chat(question, "Paris " * (number + 1)))
    return write(folder / "data.jsonl", *records)
