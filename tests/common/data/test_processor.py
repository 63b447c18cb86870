"""Processors whose part for videos needs torchvision make the tokens and pixels of images without it."""

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from common.data.processor import load_processor
from tests.common.data.conftest import make_tokenizer
from tests.common.data.processors import draw

CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
HALVES = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
# As published with Qwen2-VL-7B, Qwen2.5-VL-7B, and Qwen3-VL-8B: class, model type, and settings of images.
PUBLISHED = {
    "Qwen2VLProcessor": ("qwen2_vl", {"patch_size": 14, "min_pixels": 3136, "max_pixels": 12845056, **CLIP}),
    "Qwen2_5_VLProcessor": ("qwen2_5_vl", {"patch_size": 14, "min_pixels": 3136, "max_pixels": 12845056, **CLIP}),
    "Qwen3VLProcessor": (
        "qwen3_vl", {"patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 16777216}, **HALVES},
    ),
}  # fmt: skip
MARKS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]


def write_processor(folder: Path, kind: str, names_class: bool) -> Path:
    model_type, settings = PUBLISHED[kind]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer()._tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.add_tokens(MARKS, special_tokens=True)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    settings = {**settings, "temporal_patch_size": 2, "merge_size": 2}
    settings["image_processor_type"] = "Qwen2VLImageProcessor"
    if names_class:
        settings["processor_class"] = kind
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("names_class", [True, False])
@pytest.mark.parametrize("kind", PUBLISHED)
def test_images_need_no_torchvision(tmp_path: Path, kind: str, names_class: bool) -> None:
    from PIL import Image

    processor = load_processor(write_processor(tmp_path, kind, names_class))
    assert type(processor).__name__ == kind
    pictures = [
        Image.open(draw(tmp_path / f"{seed}.png", seed, size))
        for seed, size in ((1, (300, 200)), (2, (64, 640)))
    ]
    marks = "".join(f"{MARKS[0]}{MARKS[2]}{MARKS[1]}" for _ in pictures)
    made = processor(images=pictures, text=[f"{marks} two pictures"], return_tensors="pt")
    patches = made["image_grid_thw"].prod(dim=1)
    width = 3 * 2 * PUBLISHED[kind][1]["patch_size"] ** 2
    assert made["pixel_values"].shape == (int(patches.sum()), width)
    pad = processor.tokenizer.convert_tokens_to_ids(MARKS[2])
    # Four patches are merged into a token
    assert int((made["input_ids"] == pad).sum()) == int(patches.sum()) // 4
