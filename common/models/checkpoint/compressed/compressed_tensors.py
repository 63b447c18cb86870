"""Read checkpoints in the formats of the library compressed-tensors."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from common.errors import FinetuneError, UserError
from common.models.checkpoint.compressed.method import FLOAT_CODES, FoundTensor, checked, component, even_blocks
from common.models.checkpoint.compressed.tensors import Component, CompressedTensor, ordered
from common.models.checkpoint.shards import Shards


class CompressedTensors:
    """The formats of the library compressed-tensors (llm-compressor) that write each weight as a whole."""

    name = "compressed-tensors"
    _beside = (
        "weight_shape",
        "input_scale",
        "input_zero_point",
        "input_global_scale",
        "output_scale",
        "output_zero_point",
    )
    _unknown = ("weight_g_idx", "compressed", "bitmask", "row_offsets")

    def __init__(self, settings: Mapping[str, Any]) -> None:
        groups = [group for group in (settings.get("config_groups") or {}).values() if group.get("weights")]
        self._groups: list[tuple[list[str], dict[str, Any]]] = [(g.get("targets") or [], g["weights"]) for g in groups]
        sparse = (settings.get("sparsity_config") or {}).get("format") or "dense"
        transforms = (settings.get("transform_config") or {}).get("config_groups")
        if sparse != "dense" or transforms:
            what = "transforms of activations" if transforms else f"sparse weights ({sparse})"
            raise UserError(
                f"compressed-tensors with {what} cannot be read here. Give the checkpoint it was made from."
            )

    def find(self, shards: Shards) -> Iterator[tuple[str, FoundTensor]]:
        for name, scale in shards.tensors.items():
            module = name.removesuffix(".weight_scale")
            if module == name:
                continue
            there = {
                key: f"{module}.{key}"
                for key in (
                    "weight",
                    "weight_packed",
                    "weight_scale",
                    "weight_zero_point",
                    "weight_global_scale",
                    *self._beside,
                    *self._unknown,
                )
                if f"{module}.{key}" in shards.tensors
            }
            unknown = next((there[key] for key in self._unknown if key in there), None)
            if unknown is not None:
                raise UserError(
                    f"{scale.file} holds {unknown}: weights in another order, or sparse ones, cannot be read here. "
                    "Give the checkpoint it was made from."
                )
            codes = there.get("weight_packed") or there.get("weight")
            if codes is None:
                raise FinetuneError(f"{scale.file} holds {name}, and no file of the checkpoint {module}.weight_packed.")
            names = {"codes": codes, "scale": name}
            for role in ("zero_point", "global_scale"):
                if f"weight_{role}" in there:
                    names[role] = there[f"weight_{role}"]
            components = {role: component(role, shards.tensors[one]) for role, one in names.items()}
            tensor = self._tensor(module, components, there.get("weight_shape"), shards)
            beside = tuple(there[key] for key in self._beside if key in there)
            yield f"{module}.weight", checked(FoundTensor(tensor, names, beside), f"{module}.weight", shards)

    def _tensor(
        self, module: str, components: dict[str, Component], shape_name: str | None, shards: Shards
    ) -> CompressedTensor:
        codes, scale = components["codes"], components["scale"]
        settings = self._settings(module)
        *leading, rows, width = codes.shape if len(codes.shape) > 1 else (1, *codes.shape)
        dtype = scale.dtype
        if codes.dtype in FLOAT_CODES:
            kind, columns = FLOAT_CODES[codes.dtype], width
        elif codes.dtype == torch.int8:
            kind, columns = "int8", width
        elif codes.dtype == torch.uint8:  # NVFP4 and MXFP4: their library makes bf16 of them
            kind, columns, dtype = "e2m1", 2 * width, torch.bfloat16
        else:
            bits = settings.get("num_bits")
            if codes.dtype != torch.int32 or bits not in (4, 8):
                raise UserError(
                    f"{module} is packed with {bits} bits into {str(codes.dtype).removeprefix('torch.')}: there are 4 "
                    "and 8 bits in int32. Give the checkpoint it was made from."
                )
            kind, columns = f"offset int{bits}", width * 32 // bits
            if shape_name is not None and columns != (settings.get("group_size") or 0) * scale.shape[-1]:
                columns = int(shards.read(shape_name)[-1])  # the last word may hold fewer
        block = self._block_of(module, settings, rows, columns, scale)
        if dtype.itemsize == 1:
            dtype = torch.bfloat16
        return CompressedTensor(kind, (*leading, rows, columns), block, dtype, ordered(components))

    @staticmethod
    def _block_of(
        module: str, settings: Mapping[str, Any], rows: int, columns: int, scale: Component
    ) -> tuple[int, int]:
        strategy = settings.get("strategy")
        if strategy == "block" and settings.get("block_structure"):
            height, width = settings["block_structure"]
            return (int(height), int(width))
        if strategy in ("group", "tensor_group") and settings.get("group_size"):
            return (1, int(settings["group_size"]))
        if strategy == "tensor":
            return (rows, columns)
        if strategy == "channel":
            return (1, columns)
        grid = scale.shape[-2:] if len(scale.shape) > 1 else (scale.shape[0] if scale.shape else 1, 1)
        return even_blocks(module, rows, columns, grid)

    def _settings(self, module: str) -> dict[str, Any]:
        """Return the settings of a module's weights in config.json: by name, by pattern, else by the kind of layer."""
        if len(self._groups) == 1:
            return self._groups[0][1]
        for named in (True, False):
            for targets, weights in self._groups:
                for target in targets:
                    pattern = target.startswith("re:") and re.match(target[3:], module) is not None
                    if (pattern or target == module) if named else not target.startswith("re:"):
                        return weights
        return {}
