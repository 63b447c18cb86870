"""Explain in a sentence what is wrong with a checkpoint that lacks weights of the model."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from common.errors import UserError
from common.models.checkpoint.compressed import CompressedShards
from common.models.checkpoint.compressed.detection import KNOWN

# Formats of compressed checkpoints, by the endings of names in them.
_ENDINGS = {
    "_scale_inv": "FP8",
    "_blocks": "MXFP4",
    ".weight_packed": "compressed-tensors",
    ".weight_scale": "FP8 or INT8",
    ".qweight": "GPTQ or AWQ",
    ".weight.absmax": "bitsandbytes",
    ".SCB": "bitsandbytes",
}


def refuse_compressed(shards: CompressedShards, unused: list[str]) -> None:
    """Refuse compressed weights about which config.json says nothing.

    Args:
        unused: names in the checkpoint that the model does not use.

    Raises:
        UserError: if there are such weights; names one.
    """
    if shards.method is not None:
        return
    for name in unused:
        ending = next((ending for ending in _ENDINGS if name.endswith(ending)), None)
        if ending is not None:
            raise UserError(
                f"{shards.directory} is quantized ({name} in {shards.tensors[name].file.name} looks like "
                f"{_ENDINGS[ending]}), but its config.json has no quantization_config, which says how. "
                f"Take the config.json that came with these weights: of quantized checkpoints {KNOWN} can be read."
            )


def explain_missing(model: PreTrainedModel, directory: Path, missing: list[str], unused: list[str]) -> str:
    """Return which parameters the checkpoint in ``directory`` lacks, and why that may be."""
    total = sum(1 for _ in model.named_parameters())
    kind = type(model).__name__
    inside = [name for name, _ in model.named_parameters() if name.startswith(f"{model.base_model_prefix}.")]
    some = _some(missing)
    if inside and not any(name.startswith(f"{model.base_model_prefix}.") for name in missing):
        other = (
            f" It has {_some(unused)}, for which a {kind} has no use: it was saved as another kind." if unused else ""
        )
        tied = '; if the embeddings are its head, set "tie_word_embeddings": true in config.json'
        return (
            f"{directory} is a model without its head: of what a {kind} has, it lacks {some} and nothing else.{other} "
            f"Save it with its head ({kind}){tied if _is_head(model, missing) and not unused else ''}."
        )
    theirs = f" It has {_some(unused)} instead." if unused else ""
    return (
        f"{directory} lacks {len(missing)} of the model's {total} parameters: {some}.{theirs} "
        f"Is config.json, which makes it a {kind}, the one that belongs to these weights?"
    )


def _is_head(model: PreTrainedModel, missing: list[str]) -> bool:
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    return isinstance(weight, torch.Tensor) and any(
        parameter is weight for name, parameter in model.named_parameters() if name in missing
    )


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
