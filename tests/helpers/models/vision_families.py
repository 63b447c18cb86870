"""Vision-language families, small: configurations, batches with images as processors make them, and a plain loop."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig, Trainer

IMAGE = 90
"""The token that stands for a piece of an image."""

_TEXT: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "head_dim": 8,
}  # fmt: skip
_SEEN: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
_QWEN_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}
_QWEN_SEEN: dict[str, Any] = {
    "depth": 2, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip


def _axes(section: list[int], **others: Any) -> dict[str, Any]:
    return {"rope_type": "default", "mrope_section": section, "rope_theta": 1e4, **others}


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "text_config": _TEXT | {
            "num_hidden_layers": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "rope_parameters": _axes([2, 1, 1], mrope_interleaved=True, partial_rotary_factor=1.0),
        },
        "vision_config": _QWEN_SEEN | {"num_position_embeddings": 16}, **_QWEN_TOKENS,
    },
    "qwen3_vl": {
        "text_config": _TEXT | {"rope_parameters": _axes([2, 1, 1], mrope_interleaved=True)},
        # A tower with more parameters than the language model.
        "vision_config": _QWEN_SEEN | {"depth": 8, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        **_QWEN_TOKENS,
    },
    "gemma4": {
        "text_config": _TEXT | {
            "global_head_dim": 8, "sliding_window": 8, "vocab_size_per_layer_input": 99,
            "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 1,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        },
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 2,
            "position_embedding_size": 64,
        },
        "audio_config": None, "image_token_id": IMAGE, "boi_token_id": 92, "eoi_token_id": 93,
    },
    "llama4": {
        "text_config": _TEXT | {
            "intermediate_size_mlp": 48, "num_local_experts": 2, "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2, "attention_chunk_size": 64,
        },
        "vision_config": _SEEN | {
            "intermediate_size": 128, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
            "pixel_shuffle_ratio": 0.5,
        },
        "image_token_index": IMAGE, "boi_token_index": 92, "eoi_token_index": 93,
    },
    "mistral3": {
        "text_config": _TEXT | {"model_type": "mistral"}, "vision_config": _SEEN | {"model_type": "pixtral"},
        "image_token_index": IMAGE, "spatial_merge_size": 2,
    },
    "internvl": {
        "text_config": _TEXT | {"model_type": "qwen2"},
        "vision_config": _SEEN | {"model_type": "internvl_vision", "image_size": [16, 16], "patch_size": [4, 4]},
        "image_token_id": IMAGE, "downsample_ratio": 0.5,
    },
    "qwen2_vl": {
        "text_config": _TEXT | {"rope_parameters": _axes([1, 1, 2])},
        "vision_config": {
            "depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4,
            "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
        **_QWEN_TOKENS,
    },
    "qwen2_5_vl": {
        "text_config": _TEXT | {"rope_parameters": _axes([1, 1, 2])},
        "vision_config": _QWEN_SEEN | {"window_size": 16, "fullatt_block_indexes": [1]}, **_QWEN_TOKENS,
    },
    "qwen3_vl_moe": {
        "text_config": _TEXT | {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "rope_parameters": _axes([2, 1, 1], mrope_interleaved=True),
        },
        "vision_config": _QWEN_SEEN | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}, **_QWEN_TOKENS,
    },
    "glm4v": {
        "text_config": _TEXT | {"rope_parameters": _axes([1, 1, 2], partial_rotary_factor=1.0)},
        "vision_config": _QWEN_SEEN | {"image_size": 16}, "image_token_id": IMAGE, "video_token_id": 91,
        "image_start_token_id": 92, "image_end_token_id": 93, "video_start_token_id": 94, "video_end_token_id": 95,
    },
    "gemma3": {
        "text_config": _TEXT | {
            "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        "vision_config": _SEEN | {"model_type": "siglip_vision_model", "num_hidden_layers": 4},
        "image_token_index": IMAGE, "image_token_id": IMAGE, "boi_token_index": 92, "eoi_token_index": 93,
        "mm_tokens_per_image": 4,
    },
    "paligemma": {
        "text_config": _TEXT | {"model_type": "gemma"}, "image_token_index": IMAGE, "projection_dim": 32,
        "vision_config": _SEEN | {"model_type": "siglip_vision_model", "vision_use_head": False, "projection_dim": 32},
    },
    "llava": {
        "text_config": _TEXT | {"model_type": "llama"}, "image_token_index": IMAGE, "vision_feature_layer": -1,
        "vision_config": _SEEN | {"model_type": "clip_vision_model", "projection_dim": 32}, "image_seq_length": 16,
    },
    "llava_next": {
        "text_config": _TEXT | {"model_type": "llama"}, "image_token_index": IMAGE, "vision_feature_layer": -1,
        "vision_config": _SEEN | {"model_type": "clip_vision_model", "projection_dim": 32},
        "image_grid_pinpoints": [[16, 32], [32, 16]],
    },
    "smolvlm": {
        "text_config": _TEXT | {"model_type": "llama"}, "vision_config": _SEEN, "image_token_id": IMAGE,
        "scale_factor": 2, "pad_token_id": 0,
    },
    "idefics3": {
        "text_config": _TEXT | {"model_type": "llama"}, "vision_config": _SEEN, "image_token_id": IMAGE,
        "scale_factor": 2, "pad_token_id": 0,
    },
    "got_ocr2": {
        "text_config": _TEXT | {"model_type": "qwen2"}, "image_token_index": IMAGE, "image_seq_length": 1,
        "vision_config": {
            "hidden_size": 32, "output_channels": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 64, "patch_size": 16, "window_size": 2, "global_attn_indexes": [1], "mlp_dim": 48,
        },
    },
}  # fmt: skip
NAMED = ("qwen3_5", "qwen3_vl", "gemma4", "llama4", "mistral3", "internvl")
OTHERS = tuple(name for name in FAMILIES if name not in (*NAMED, "llava_next"))
_GRIDS = ("qwen3_5", "qwen3_vl", "qwen2_vl", "qwen2_5_vl", "qwen3_vl_moe", "glm4v")
_TYPES = {"gemma3": "token_type_ids", "paligemma": "token_type_ids", "gemma4": "mm_token_type_ids"}


def family_config(family: str) -> PreTrainedConfig:
    return AutoConfig.for_model(family, **FAMILIES[family])


def save_checkpoint(directory: Path, family: str) -> Path:
    """A checkpoint with distinct random weights everywhere."""
    torch.manual_seed(7)
    model = AutoModelForImageTextToText.from_config(family_config(family))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(directory)
    return directory


def image(family: str, generator: torch.Generator, large: bool) -> tuple[list[int], dict[str, torch.Tensor]]:
    """One image: the tokens in its place, and what the family's processor gives for it."""

    def pixels(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    if family in _GRIDS:
        height, width = 4, 8 if large else 4
        tokens = [92] + [IMAGE] * (height * width // 4) + [93]
        grid = torch.tensor([[1, height, width]])
        return tokens, {"pixel_values": pixels(height * width, 96), "image_grid_thw": grid}
    if family == "mistral3":
        height = 16 if large else 8
        sizes = torch.tensor([[height, 16]])
        return [IMAGE] * (height // 8 * 2), {"pixel_values": pixels(1, 3, height, 16), "image_sizes": sizes}
    if family in ("smolvlm", "idefics3"):
        return [IMAGE] * 4, {"pixel_values": pixels(1, 1, 3, 16, 16)}
    if family == "gemma4":
        places = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), -1).reshape(
            1, 16, 2
        )
        return [IMAGE] * 4, {"pixel_values": pixels(1, 16, 48), "image_position_ids": places}
    if family == "got_ocr2":
        return [IMAGE], {"pixel_values": pixels(1, 3, 64, 64)}
    return [IMAGE] * (16 if family in ("llava", "paligemma") else 4), {"pixel_values": pixels(1, 3, 16, 16)}


def image_batch(family: str, seed: int, tokens: int = 44) -> dict[str, Any]:
    """Three rows: of one image, of none, and of two; of one each, where the family wants as many in every row."""
    generator = torch.Generator().manual_seed(seed)

    def words(count: int) -> list[int]:
        return torch.randint(3, 89, (count,), generator=generator).tolist()

    counts = (1, 1, 1) if family in ("smolvlm", "idefics3") else (1, 0, 2)
    rows, lists = [], {}
    for row, count in enumerate(counts):
        made, found = words(3), {}
        for _ in range(count):
            ids, tensors = image(family, generator, large=row == 0)
            made += ids + words(2)
            for name, value in tensors.items():
                found.setdefault(name, []).append(value)
        rows.append(made + words(tokens - len(made)))
        for name, values in found.items():
            lists.setdefault(name, [None] * len(counts))[row] = torch.cat(values)
    ids = torch.tensor(rows)
    labels = ids.masked_fill(ids >= IMAGE, -100)
    labels[:, :3] = -100
    types = "mm_token_type_ids" if family in _GRIDS else _TYPES.get(family)
    return {"input_ids": ids, "labels": labels, **lists, **({types: (ids == IMAGE).long()} if types else {})}


def text_batch(seed: int, tokens: int = 44) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 89, (3, tokens), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(tokens) < 3, -100)}


def halves(batch: Mapping[str, Any], rows: int) -> Iterator[dict[str, torch.Tensor]]:
    """Micro-batches, put together in another way than the engine does: an image at a time."""
    for start in range(0, len(batch["input_ids"]), rows):
        part = {}
        for name, value in batch.items():
            taken = value[start : start + rows]
            if isinstance(taken, list):
                entries = [one for entry in taken if entry is not None for one in entry]
                if not entries:
                    continue
                shape = [max(sizes) for sizes in zip(*(one.shape for one in entries), strict=True)]
                whole = torch.zeros(len(entries), *shape, dtype=entries[0].dtype)
                for place, one in zip(whole, entries, strict=True):
                    place[tuple(slice(size) for size in one.shape)] = one
                taken = whole
            part[name] = taken
        yield part


class PlainLoop:
    """PyTorch's own AdamW on the whole model in memory."""

    def __init__(self, checkpoint: Path, frozen: frozenset[str], lr: float, weight_decay: float, eps: float):
        self.model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32).train()
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name not in frozen)
        decayed, rest, names = [], [], Trainer.get_decay_parameter_names(None, self.model)
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                (decayed if name in names else rest).append(parameter)
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=lr, eps=eps)

    def step(self, batch: Mapping[str, Any], rows: int) -> float:
        items = (batch["labels"][:, 1:] != -100).sum()
        total = 0.0
        for part in halves(batch, rows):
            labels = part.pop("labels")
            logits = self.model(**part, use_cache=False).logits[:, :-1].flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / items
            loss.backward()
            total += loss.item()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total
