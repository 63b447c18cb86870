"""The table of a GGUF file's tensors, by the names that a checkpoint of the same model has for them.

It is a file in the directory that describes the GGUF file (:mod:`common.models.checkpoint.gguf`). The tensors stay
where they are, and links next to the table lead there.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers import modeling_gguf_pytorch_utils as gguf_utils

from common.errors import FinetuneError
from common.files import FILE_BYTES, read_text_file
from common.models.names import GGUF_TABLE as TABLE

_SUPPORTED = gguf_utils.GGUF_SUPPORTED_ARCHITECTURES
# Llama.cpp's names that are no spelling of the family's
_ARCHITECTURES = {"mistral": "llama", "cohere": "command-r"}
_REORDERED = ("falcon", "deci")  # Families whose rows llama.cpp reorders, which transformers does not undo


@dataclass(frozen=True)
class GgufEntry:
    """A tensor in a GGUF file, or one expert's part of it."""

    file: str  # Name of the link to the file
    name: str  # Name in the file
    kind: str  # Type: ``Q4_K``, for instance
    start: int  # Its first byte in the file
    shape: tuple[int, ...]  # Numbers, as the file has them
    row_nbytes: int
    heads: int = 0  # Heads whose rows are in llama.cpp's order; 0: the rows are in the model's
    transposed: bool = False  # Whether the model has rows and columns the other way round
    becomes: tuple[int, ...] = ()  # Shape in the model, if transformers computes it from these numbers

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return (*self.shape[:-1], self.row_nbytes)

    @property
    def is_by_rows(self) -> bool:
        """Whether each row of the file is a row of the model."""
        return not (self.becomes or self.transposed)

    @property
    def model_shape(self) -> tuple[int, ...]:
        return self.becomes or (self.shape[::-1] if self.transposed else self.shape)


def model_order(rows: Any, heads: int) -> Any:
    """Return rows of whole heads, which llama.cpp permutes for its rotary embeddings, in the order of the model."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def file_order(rows: Any, heads: int) -> Any:
    """Undo :func:`model_order`."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


class GgufTable:
    """The table in a directory that describes a GGUF file.

    Raises:
        FinetuneError: it is damaged.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        try:
            content = json.loads(read_text_file(directory / TABLE, FILE_BYTES))
            self.architecture: str = content["architecture"]
            shapes = ("shape", "becomes")
            self.entries = {
                name: GgufEntry(**entry | {key: tuple(entry[key]) for key in shapes})
                for name, entry in content["tensors"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FinetuneError(
                f"{directory / TABLE} is damaged ({error!r:.200}): remove {directory}."
            ) from error

    def numbers(self, name: str, stored: torch.Tensor) -> torch.Tensor:
        """Return the numbers in the model of a tensor that is not kept in its bytes, in fp32.

        Args:
            stored: its bytes ``[..., row_nbytes]``, or those of some rows, in the model's order.
        """
        from gguf import GGMLQuantizationType, dequantize

        entry = self.entries[name]
        kind = GGMLQuantizationType[entry.kind]
        data = stored.numpy()
        data = data.view({"F32": np.float32, "F16": np.float16}.get(entry.kind, np.uint8))
        numbers = dequantize(data, kind)
        if entry.becomes:
            parsed: dict[str, Any] = {"tensors": {}}
            result = self._processor.process(
                weights=numbers, name=entry.name, tensor_key_mapping={}, parsed_parameters=parsed
            )
            numbers = result.weights.reshape(entry.becomes)
        elif entry.transposed:
            numbers = numbers.T
        return torch.from_numpy(np.array(numbers, dtype=np.float32))

    @cached_property
    def _processor(self) -> Any:
        return processor_of(self.architecture, AutoConfig.from_pretrained(self._directory).to_dict())


def processor_of(architecture: str, config: dict[str, Any]) -> Any:
    """Return what transformers computes a model's tensors with."""
    return gguf_utils.TENSOR_PROCESSORS.get(architecture, gguf_utils.TensorProcessor)(config=config)


def gguf_names(
    architecture: str, config: PreTrainedConfig, names: Iterable[str], prefix: str, processor: Any
) -> dict[str, str]:
    """Return parameters' names by those of the tensors of a GGUF file that make them.

    Args:
        names: names of all parameters.
        prefix: beginning of the names of what is below the model's head.
    """
    result: dict[str, str] = {}
    names = list(names)
    for before in (f"{prefix}.", ""):
        inside = {name.removeprefix(before): None for name in names if name.startswith(before)}
        # Without submodules, for each of which transformers would make gguf's table of names again.
        flat = SimpleNamespace(config=config, state_dict=lambda inside=inside: inside, named_children=list)
        result |= gguf_utils.get_gguf_hf_weights_map(flat, processor, architecture, qual_name=before)
    return result


@dataclass(frozen=True)
class RowOrder:
    """How the rows of a matrix in a GGUF file lie in the model."""

    heads: int = 0
    transposed: bool = False


def order_of(processor: Any, name: str, shape: Sequence[int], config: dict[str, Any]) -> RowOrder | None:
    """Return how rows of a matrix lie in the model, from what transformers makes of one with as many; None: otherwise.

    Args:
        name: name of the tensor in the file.
        shape: shape in the model.
    """
    for transposed, rows in ((False, shape[0]), (True, shape[-1])):
        numbers = np.arange(2.0 * rows, dtype=np.float32).reshape(rows, 2)
        try:
            parsed: dict[str, Any] = {"tensors": {}}
            result = processor.process(numbers, name, tensor_key_mapping={}, parsed_parameters=parsed).weights
        except Exception:  # it needs all columns
            return None
        if np.array_equal(result, numbers.T if transposed else numbers):
            return RowOrder(transposed=transposed)
        for key in ("num_attention_heads", "num_key_value_heads"):
            heads = config.get(key)
            if heads and rows % (2 * heads) == 0 and np.array_equal(result, model_order(numbers, heads)):
                return RowOrder(heads)
    return None


def architecture_of(config: PreTrainedConfig) -> str | None:
    """Return llama.cpp's name of a family; None: how its tensors lie in GGUF files is not known."""
    from gguf import MODEL_ARCH_NAMES

    kind = config.model_type.removesuffix("_text")
    if kind in _REORDERED or not any(kind in (known, known.replace("-", "_")) for known in _SUPPORTED):
        return None
    plain = {name.replace("-", ""): name for name in MODEL_ARCH_NAMES.values()}
    return plain.get(_ARCHITECTURES.get(kind, kind).replace("_", ""))
