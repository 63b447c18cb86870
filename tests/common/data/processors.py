"""Small processors, which need Pillow and nothing else, and pictures for them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast, ProcessorMixin

from tests.common.data.conftest import make_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ m['role'] }}\n"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}IMAGE{% else %}{{ p['text'] }}{% endif %}{% endfor %}"
    "</s>\n{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
# As Qwen3's: what the assistant said before its last turn is shown in another way.
REWRITING_TEMPLATE = TEMPLATE.replace(
    "</s>\n", "{% if m['role'] == 'assistant' and not loop.last %}(earlier){% endif %}</s>\n"
)


def make_processor(template: str = TEMPLATE) -> ProcessorMixin:
    """Gemma 3's: each image becomes four tokens and two around them."""
    from transformers import Gemma3ImageProcessorPil, Gemma3Processor

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer()._tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        extra_special_tokens={"image_token": "<img>", "boi_token": "<boi>", "eoi_token": "<eoi>"},
    )  # fmt: skip
    images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16}, do_pan_and_scan=False)
    return Gemma3Processor(
        images, tokenizer, chat_template=template.replace("IMAGE", "<boi>"), image_seq_length=4
    )


def draw(path: Path, seed: int, size: tuple[int, int] = (20, 30)) -> Path:
    """A picture of noise."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 255, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def chat(*turns: str | Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A record: the user begins, turns alternate."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[number % 2], "content": turn} for number, turn in enumerate(turns)]}


def write(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
