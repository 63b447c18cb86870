"""Detect how a checkpoint is compressed, by the ``quantization_config`` in its config.json, and read its tensors.

That says which tensors to look for. Which weights are compressed, the files say: a weight without scales next to it
(``modules_to_not_convert``, ``ignore``) is a plain one.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from common.errors import UserError
from common.models.checkpoint.compressed.formats import METHODS, CompressedTensors, FoundTensor, Fp8, Mxfp4
from common.models.checkpoint.compressed.tensors import CompressedTensor
from common.models.checkpoint.shards import Shards, StoredTensor

Method = Fp8 | Mxfp4 | CompressedTensors
KNOWN = "FP8 (fp8), MXFP4 (mxfp4) and compressed-tensors"


def method_of(directory: Path) -> Method | None:
    """Return how the checkpoint in a directory is compressed, by its config.json; None if it is not."""
    try:
        content = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # transformers says what is wrong with it
    settings = _settings_in(content) if isinstance(content, dict) else None
    return None if settings is None else _method(settings, str(directory))


def accept_config(config: PreTrainedConfig, name: str, has_weights: bool) -> None:
    """Remove ``quantization_config`` of a known method from a configuration with weights: a plain model is trained."""
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
        settings = part.get("quantization_config") or part.get("compression_config")
        if isinstance(settings, dict):
            return settings
    return None


def _method(settings: Mapping[str, Any], name: str) -> Method:
    method = settings.get("quant_method")
    if method in METHODS:
        return METHODS[method](settings)
    raise UserError(
        f"{name} is quantized ({method}), and of quantized checkpoints only {KNOWN} can be read. "
        "Give the checkpoint it was quantized from, in fp32, bf16 or fp16."
    )


class CompressedShards(Shards):
    """A checkpoint's safetensors files, some of whose tensors are compressed.

    Args:
        directory: holds ``config.json`` and safetensors files; see :class:`Shards`.

    Attributes:
        method: how it is compressed; None if it is not: then all tensors are as they are in the files.
        compressed: the compressed ones among ``tensors``, which has the shape and dtype of their numbers.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.method: Method | None = method_of(directory)
        self.compressed: dict[str, FoundTensor] = {}
        if self.method is None:
            return
        self.compressed = dict(self.method.find(self))
        hidden = {name for entry in self.compressed.values() for name in (*entry.names.values(), *entry.attached)}
        self.tensors = {name: stored for name, stored in self.files.items() if name not in hidden}
        for name, entry in self.compressed.items():
            codes = self.files[entry.names["codes"]]
            self.tensors[name] = StoredTensor(codes.file, entry.tensor.dtype, entry.tensor.model_shape, codes.name)

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor, as :meth:`Shards.read`; a compressed one is dequantized."""
        entry = self.compressed.get(name)
        return super().read(name) if entry is None else _decoded(entry.tensor, self.components(name))

    def reads_rows(self, name: str) -> bool:
        """Return whether :meth:`read_rows` reads no more than these rows: of a compressed matrix it does."""
        entry = self.compressed.get(name)
        return super().reads_rows(name) if entry is None else entry.tensor.matrices(0, 1) is not None

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read rows of a tensor, as :meth:`Shards.read_rows`; all of a compressed matrix is read."""
        entry = self.compressed.get(name)
        if entry is None:
            return super().read_rows(name, start, stop)
        some = entry.tensor.matrices(start, stop)
        if some is None:
            return self.read(name)[start:stop]
        read, read_rows = super().read, super().read_rows
        parts = {
            role: read(stored) if role == "global_scale" else read_rows(stored, start, stop)
            for role, stored in entry.names.items()
        }
        return _decoded(some, parts)

    def components(self, name: str) -> dict[str, torch.Tensor]:
        """Read the components of a compressed tensor as they are in the files, by their roles."""
        read = super().read  # which knows nothing of what is compressed
        return {role: read(stored) for role, stored in self.compressed[name].names.items()}


def _decoded(tensor: CompressedTensor, components: Mapping[str, torch.Tensor]) -> torch.Tensor:
    whole = torch.empty(tensor.model_shape, dtype=tensor.dtype)
    tensor.decode(components, whole.transpose(-1, -2) if tensor.transposed else whole)
    return whole
