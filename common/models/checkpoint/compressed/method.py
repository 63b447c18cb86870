"""Methods of compression: which tensors of a checkpoint's files belong together, and formats with scaled blocks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from common.errors import FinetuneError
from common.models.checkpoint.compressed.tensors import Component, CompressedTensor, ordered
from common.models.checkpoint.shards import Shards, StoredTensor

# Kind of codes of tensors that hold one number in a byte, by their dtype.
FLOAT_CODES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


@dataclass(frozen=True)
class FoundTensor:
    """A compressed tensor that was found in the files."""

    tensor: CompressedTensor
    names: dict[str, str]  # Names of its components in the files, by their roles
    beside: tuple[str, ...] = ()  # Names of tensors that are useless without it: shapes, scales of activations


class Method(Protocol):
    """A method of compressing checkpoints."""

    name: str  # Name in config.json: `quant_method`

    def find(self, shards: Shards) -> Iterator[tuple[str, FoundTensor]]:
        """Find every compressed tensor, by the name that it would have if it were a plain one.

        Raises:
            FinetuneError, UserError: components do not fit together, or their format is not supported.
        """
        ...


def even_blocks(name: str, rows: int, columns: int, grid: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns of a block where all are equally large, from the grid of scales.

    Raises:
        FinetuneError: they cannot be equally large.
    """
    if not (grid[0] and grid[1]) or rows % grid[0] or columns % grid[1]:
        raise FinetuneError(
            f"{name} of shape {[rows, columns]} has scales of shape {list(grid)}, and the quantization_config in "
            "config.json does not say which blocks they are for."
        )
    return rows // grid[0], columns // grid[1]


def component(role: str, stored: StoredTensor) -> Component:
    """Describe a tensor of the files as a component."""
    return Component(role, stored.dtype, stored.shape)


def checked(found: FoundTensor, name: str, shards: Shards) -> FoundTensor:
    """Return ``found``, if its components fit together.

    Raises:
        FinetuneError: if not.
    """
    problem = found.tensor.problem()
    if problem is not None:
        file = shards.tensors[found.names["codes"]].file
        raise FinetuneError(
            f"{file}: {name} cannot be read: {problem}. config.json and weights do not belong together."
        )
    return found


class Fp8:
    """FP8 in blocks, as in DeepSeek-V3 (``weight_scale_inv``); one scale for all where there are no blocks."""

    name = "fp8"
    _beside = ("activation_scale", "input_scale", "qscale_act")

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._block = settings.get("weight_block_size")

    def find(self, shards: Shards) -> Iterator[tuple[str, FoundTensor]]:
        """Find every compressed tensor; see :meth:`Method.find`."""
        for name, stored in shards.tensors.items():
            if (stored.dtype not in FLOAT_CODES and stored.dtype != torch.int8) or len(stored.shape) < 2:
                continue
            module, _, last = name.rpartition(".")
            prefix = f"{module}." if module else ""
            candidates = [f"{name}_scale_inv", *(f"{prefix}{one}" for one in ("scale", "qscale_weight"))]
            scale = next((one for one in candidates if one in shards.tensors), None)
            if scale is None or (last != "weight" and scale != candidates[0]):
                continue
            beside = tuple(f"{prefix}{one}" for one in self._beside if f"{prefix}{one}" in shards.tensors)
            tensor = self._tensor(name, stored, shards.tensors[scale])
            yield name, checked(FoundTensor(tensor, {"codes": name, "scale": scale}, beside), name, shards)

    def _tensor(self, name: str, stored: StoredTensor, scale: StoredTensor) -> CompressedTensor:
        codes = FLOAT_CODES.get(stored.dtype, "e2m1")  # two to a byte, which is what int8 means here
        shape = (*stored.shape[:-1], stored.shape[-1] * (2 if codes == "e2m1" else 1))
        components = {"codes": component("codes", stored), "scale": component("scale", scale)}
        rows, columns = shape[-2:]
        grid = scale.shape[-2:] if len(scale.shape) >= 2 else (1, 1)
        block = self._block
        if not block or grid != (-(-rows // block[0]), -(-columns // block[1])):
            # Experts of some checkpoints have their own blocks: the grid of scales tells, as in transformers.
            block = even_blocks(name, rows, columns, grid)
        return CompressedTensor(codes, shape, (int(block[0]), int(block[1])), torch.float32, ordered(components))


class Mxfp4:
    """MXFP4 as in gpt-oss: ``*_blocks`` of 32 numbers in 16 bytes, ``*_scales`` with their exponents."""

    name = "mxfp4"

    def find(self, shards: Shards) -> Iterator[tuple[str, FoundTensor]]:
        """Find every compressed tensor; see :meth:`Method.find`."""
        for name, blocks in shards.tensors.items():
            base = name.removesuffix("_blocks")
            scales = shards.tensors.get(f"{base}_scales")
            if base == name or scales is None:
                continue
            if len(blocks.shape) < 3:
                raise FinetuneError(f"{blocks.file}: {name} of shape {list(blocks.shape)} are not MXFP4 blocks.")
            *leading, count, width = blocks.shape
            components = {"codes": component("codes", blocks), "scale": component("scale", scales)}
            tensor = CompressedTensor(
                "e2m1", (*leading, count * width * 2), (1, width * 2), torch.bfloat16, ordered(components), True
            )
            yield base, checked(FoundTensor(tensor, {"codes": name, "scale": f"{base}_scales"}), base, shards)
