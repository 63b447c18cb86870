"""Detect how a checkpoint is compressed, by the ``quantization_config`` in its config.json.

That says which tensors to look for. Which weights are compressed, the files say: a weight without scales beside it
(``modules_to_not_convert``, ``ignore``) is a plain one.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from common.errors import UserError
from common.models.checkpoint.compressed.block_scaled import Fp8, Mxfp4
from common.models.checkpoint.compressed.compressed_tensors import CompressedTensors
from common.models.checkpoint.compressed.method import Method

KNOWN = "FP8 (fp8), MXFP4 (mxfp4) and compressed-tensors"


def method_of(directory: Path) -> Method | None:
    """Return how the checkpoint in a directory is compressed, by its config.json; None if it is not.

    Raises:
        UserError: its method is not supported.
    """
    try:
        content = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # transformers says what is wrong with it
    settings = _settings_in(content) if isinstance(content, dict) else None
    return None if settings is None else _method(settings, str(directory))


def accept_config(config: PreTrainedConfig, name: str, has_weights: bool) -> None:
    """Remove ``quantization_config`` from a configuration: the model that is trained is a plain one.

    Args:
        has_weights: whether it belongs to a checkpoint.

    Raises:
        UserError: its method of compression is not supported, or there are no weights.
    """
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        settings = getattr(part, "quantization_config", None)
        if not settings:
            continue
        settings = settings if isinstance(settings, dict) else settings.to_dict()
        if not has_weights:
            raise UserError(
                f"{name} is quantized ({settings.get('quant_method')}), and there are no weights to read: give its "
                "checkpoint's directory, or a configuration without quantization_config."
            )
        _method(settings, name)
        del part.quantization_config


def _settings_in(content: dict[str, Any]) -> dict[str, Any] | None:
    inner = [value for value in content.values() if isinstance(value, dict)]
    for part in (content, *inner):
        found = part.get("quantization_config") or part.get("compression_config")
        if isinstance(found, dict):
            return found
    return None


def _method(settings: Mapping[str, Any], name: str) -> Method:
    method = settings.get("quant_method")
    if method == Fp8.name:
        return Fp8(settings)
    if method == Mxfp4.name:
        return Mxfp4()
    if method == CompressedTensors.name:
        return CompressedTensors(settings)
    raise UserError(
        f"{name} is quantized ({method}), and of quantized checkpoints only {KNOWN} can be read. "
        "Give the checkpoint it was quantized from, in fp32, bf16 or fp16."
    )
