"""Upper estimates of the memory that images take in towers and until the backward pass, per token of the sequence.

An image becomes as many tokens as it has patches, or fewer: a tower's patches are merged, mostly four to one. No more
images come in a micro-batch than its tokens have room for.
"""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from common.models.vision.towers import tower_parameters


@dataclass(frozen=True)
class ImageMemory:
    """Numbers of elements (not bytes) per token of a micro-batch, if all of its tokens belong to images."""

    working: int = 0
    """Elements while the embedding runs, forward or backward."""
    kept: int = 0
    """Elements from pass to pass: features that are added between blocks (Qwen3-VL's deepstack), and gradients."""


NO_IMAGES = ImageMemory()

_HIDDEN_SIZES, _WIDTHS = 24, 4
"""Upper bounds of the elements that a layer of a tower makes, in hidden sizes and in feed-forward widths."""
_DEPTHS = ("depth", "num_hidden_layers", "num_layers")


def image_memory(model: PreTrainedModel) -> ImageMemory:
    """Return what images take in a model with towers; nothing in one without.

    A frozen tower computes layer by layer and keeps nothing. Of one that is trained, in part or in whole, every layer's
    numbers are there at once in the backward pass.
    """
    towers = tower_parameters(model)
    if not towers:
        return NO_IMAGES
    trained = any(model.get_parameter(name).requires_grad for name in towers)
    text = model.config.get_text_config()
    working = kept = 0
    for tower in _towers(model.config):
        hidden = _first(tower, "hidden_size", "embed_dim") or text.hidden_size
        width = _first(tower, "intermediate_size", "mlp_dim") or 4 * hidden
        layers = (_first(tower, *_DEPTHS) or 1) if trained else 1
        patches = _patches_per_token(model.config, tower)
        merged = patches * hidden + _WIDTHS * text.hidden_size  # a projector's input and what it makes of it
        working = max(working, layers * patches * (_HIDDEN_SIZES * hidden + _WIDTHS * width) + merged)
        kept = max(kept, 2 * len(getattr(tower, "deepstack_visual_indexes", None) or ()) * text.hidden_size)
    return ImageMemory(working, kept)


def _towers(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    text = config.get_text_config()
    parts = [getattr(config, name, None) for name in config.sub_configs]
    return [part for part in parts if isinstance(part, PreTrainedConfig) and part is not text]


def _patches_per_token(config: PreTrainedConfig, tower: PreTrainedConfig) -> int:
    """Return how many patches of a tower become one token."""
    for part in (tower, config):
        for name in ("spatial_merge_size", "pooling_kernel_size", "scale_factor"):
            value = getattr(part, name, None)
            if isinstance(value, int) and value > 0:
                return value**2
        for name in ("pixel_shuffle_ratio", "downsample_ratio"):
            value = getattr(part, name, None)
            if isinstance(value, float) and 0 < value <= 1:
                return round(1 / value**2)
    tokens = getattr(config, "mm_tokens_per_image", None) or getattr(config, "image_seq_length", None)
    size, patch = (_pair(getattr(tower, name, None)) for name in ("image_size", "patch_size"))
    if tokens and size and patch:
        return max(1, -(-(size[0] // patch[0]) * (size[1] // patch[1]) // tokens))
    return 1


def _pair(value: Any) -> tuple[int, int] | None:
    if isinstance(value, int):
        return value, value
    return (int(value[0]), int(value[1])) if isinstance(value, list | tuple) and len(value) == 2 else None


def _first(config: PreTrainedConfig, *names: str) -> int | None:
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)
