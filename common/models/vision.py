"""Towers: the parts of a model that turn images (or sound) into input of its language model.

Behind a tower stands a projector, which maps its output to the language model's width. Both run before the blocks; they
are frozen by default, as is usual for fine-tuning.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig, PreTrainedModel

from common.errors import UserError
from common.models.structure import first_number, language_model

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class TowerFreezing:
    """The parts of a vision-language model's towers that are not trained; the names are LLaMA-Factory's."""

    freeze_vision_tower: bool = True
    freeze_multi_modal_projector: bool = True

    def frozen(self, model: PreTrainedModel) -> list[str]:
        """Return the names of the parameters of ``model`` that this freezes.

        Raises:
            UserError: something that turns images into tokens is to be trained, and ``model`` has no such part.
        """
        projector = set(projector_parameters(model))
        if not (self.freeze_multi_modal_projector or projector):
            raise UserError(
                f"--train-vision trains what turns images into tokens, and {type(model).__name__} has no such part: "
                "leave it out."
            )
        return [
            name
            for name in tower_parameters(model)
            if (self.freeze_multi_modal_projector if name in projector else self.freeze_vision_tower)
        ]


DEFAULT_FREEZING = TowerFreezing()


def tower_parameters(model: PreTrainedModel) -> list[str]:
    """Return the names of all parameters of towers and projectors: neither the language model's nor a head's."""
    _, language = language_model(model)
    if language is model:
        return []
    inside = {id(parameter) for parameter in language.parameters()}
    head = model.get_output_embeddings()
    inside |= {id(parameter) for parameter in head.parameters()} if head is not None else set()
    inputs = {id(parameter) for parameter in model.base_model.parameters()}  # next to it, there are heads
    return [
        name for name, value in model.named_parameters() if id(value) not in inside and id(value) in inputs
    ]


def projector_parameters(model: PreTrainedModel) -> list[str]:
    """Return those of :func:`tower_parameters` that are in no tower, and what is called a merger in one (Qwen, GLM)."""
    language, _ = language_model(model)
    towers = tuple(
        f"{prefix}."
        for prefix, module in model.named_modules()
        if isinstance(module, PreTrainedModel)
        and not f"{language}.".startswith(f"{prefix}." if prefix else "")
    )
    return [name for name in tower_parameters(model) if "merger" in name or not name.startswith(towers)]


@dataclass(frozen=True)
class ImageMemory:
    """Numbers of elements (not bytes) per token of a micro-batch, if all of its tokens belong to images."""

    working: int = 0  # Elements while the embedding runs, forward or backward
    # Elements from pass to pass: features added between blocks (Qwen3-VL's deepstack), and gradients
    passed: int = 0


NO_IMAGES = ImageMemory()

# Upper bounds of the elements that a tower's layer makes, in these units
_HIDDEN_SIZES = 24
_WIDTHS = 4
_DEPTHS = ("depth", "num_hidden_layers", "num_layers")


def image_memory(model: PreTrainedModel) -> ImageMemory:
    """Return what images take in a model with towers; nothing in one without.

    A frozen tower keeps nothing; of one that is trained, all layers' numbers are there at once in the backward pass.
    """
    towers = tower_parameters(model)
    if not towers:
        return NO_IMAGES
    trained = any(model.get_parameter(name).requires_grad for name in towers)
    text = model.config.get_text_config()
    working = passed = 0
    for tower in _towers(model.config):
        hidden = first_number(tower, "hidden_size", "embed_dim") or text.hidden_size
        width = first_number(tower, "intermediate_size", "mlp_dim") or 4 * hidden
        layers = (first_number(tower, *_DEPTHS) or 1) if trained else 1
        patches = _patches_per_token(model.config, tower)
        merged = patches * hidden + _WIDTHS * text.hidden_size  # a projector's input and what it makes of it
        working = max(working, layers * patches * (_HIDDEN_SIZES * hidden + _WIDTHS * width) + merged)
        passed = max(
            passed, 2 * len(getattr(tower, "deepstack_visual_indexes", None) or ()) * text.hidden_size
        )
    return ImageMemory(working, passed)


def _towers(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    text = config.get_text_config()
    parts = [getattr(config, name, None) for name in config.sub_configs]
    return [part for part in parts if isinstance(part, PreTrainedConfig) and part is not text]


def _patches_per_token(config: PreTrainedConfig, tower: PreTrainedConfig) -> int:
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
