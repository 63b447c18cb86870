"""Checkpoints in few bits, made from plain ones; each with a plain twin that holds the numbers they stand for.

Written from the formats' specifications, and differently from the product: numbers by lists of values and
``torch.kron``, nothing packed is ever read again.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from common.models.checkpoint.compressed.formats import CompressedShards

Written = tuple[dict[str, torch.Tensor], torch.Tensor]
"""Suffixes with their tensors, and the numbers."""

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def spread(scales: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """Each block's scale at each of its elements."""
    return torch.kron(scales, torch.ones(block))[: shape[0], : shape[1]]


def peaks(weight: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The largest magnitude of each block, which may be smaller at the edges."""
    return torch.stack(
        [torch.stack([part.abs().max() for part in row.split(block[1], 1)]) for row in weight.split(block[0])]
    )


def fp8(weight: torch.Tensor, block: tuple[int, int] = (16, 16)) -> Written:
    """DeepSeek-V3's."""
    scales = peaks(weight, block).float() / 448
    codes = (weight / spread(scales, block, weight.shape)).to(torch.float8_e4m3fn)
    numbers = codes.float() * spread(scales, block, weight.shape)
    return {".weight": codes, ".weight_scale_inv": scales}, numbers


def nearest_e2m1(values: torch.Tensor) -> torch.Tensor:
    return (values.unsqueeze(-1) - E2M1).abs().argmin(-1).to(torch.uint8)


def pairs(codes: torch.Tensor) -> torch.Tensor:
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def mxfp4(weight: torch.Tensor) -> Written:
    """gpt-oss': of ``[experts, in, out]``."""
    rows = weight.float().transpose(1, 2)  # [experts, out, in]
    blocks = rows.unflatten(-1, (-1, 32))
    exponents = torch.floor(torch.log2(blocks.abs().amax(-1))) - 2
    codes = nearest_e2m1(blocks / 2.0 ** exponents.unsqueeze(-1))
    numbers = (E2M1[codes.int()] * 2.0 ** exponents.unsqueeze(-1)).flatten(-2).transpose(1, 2)
    return {"_blocks": pairs(codes), "_scales": (exponents + 127).to(torch.uint8)}, numbers.contiguous()


def int4(weight: torch.Tensor, group: int | None = 16, symmetric: bool = True) -> Written:
    """pack-quantized, of compressed-tensors."""
    rows, columns = weight.shape
    group = columns if group is None else group
    parts = weight.float().unflatten(1, (-1, group))
    if symmetric:
        scales, zeros = (parts.abs().amax(-1) / 7.5).bfloat16(), torch.zeros(rows, columns // group)
    else:
        scales = ((parts.amax(-1) - parts.amin(-1)) / 15).bfloat16()
        zeros = (-8 - parts.amin(-1) / scales.float()).round().clamp(-8, 7)
    wide, shift = (spread(one.float(), (1, group), weight.shape) for one in (scales, zeros))
    codes = (weight.float() / wide + shift).round().clamp(-8, 7)
    numbers = ((codes - shift).bfloat16() * wide.bfloat16()).bfloat16()
    packed = {
        ".weight_packed": words(codes.int() + 8),
        ".weight_scale": scales,
        ".weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        packed[".weight_zero_point"] = words(zeros.int().T + 8).T.contiguous()
    return packed, numbers


def words(codes: torch.Tensor) -> torch.Tensor:
    """Eight numbers of four bits in an int32, the first one lowest."""
    codes = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % 8)).unflatten(1, (-1, 8))
    packed = (codes << (4 * torch.arange(8))).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


def nvfp4(weight: torch.Tensor) -> Written:
    """nvfp4-pack-quantized, of compressed-tensors."""
    largest = (448 * 6 / weight.float().abs().max()).reshape(1)
    scales = (weight.float().unflatten(1, (-1, 16)).abs().amax(-1) / 6 * largest).to(torch.float8_e4m3fn)
    wide = spread(scales.float() / largest, (1, 16), weight.shape)
    codes = nearest_e2m1(weight.float() / wide)
    numbers = (E2M1[codes.int()] * wide).bfloat16()
    return {".weight_packed": pairs(codes), ".weight_scale": scales, ".weight_global_scale": largest}, numbers


NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip


def nf4(weight: torch.Tensor, block: int = 32) -> Written:
    """bitsandbytes', with nested scales."""
    blocks = weight.float().view(-1, block)
    largest = blocks.abs().amax(-1)
    codes = (
        (blocks / largest.unsqueeze(-1)).unsqueeze(-1).sub(NF4).abs().argmin(-1).to(torch.uint8).view(-1, 2)
    )
    mean, values = largest.mean(), torch.linspace(-1, 1, 256)
    groups = (largest - mean).split(256)
    factors = torch.stack([group.abs().max() for group in groups])
    nested = torch.cat([(group / factor).unsqueeze(-1).sub(values).abs().argmin(-1)
                        for group, factor in zip(groups, factors, strict=True)])  # fmt: skip
    scales = (
        torch.cat([values[part] * factor for part, factor in zip(nested.split(256), factors, strict=True)])
        + mean
    )
    numbers = (NF4[codes.int()].view(-1, block) * scales.unsqueeze(-1)).view(weight.shape).bfloat16()
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": list(weight.shape),
             "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": mean.item()}  # fmt: skip
    return {
        ".weight": codes[:, :1] << 4 | codes[:, 1:], ".weight.absmax": nested.to(torch.uint8),
        ".weight.quant_map": NF4.clone(), ".weight.nested_absmax": factors, ".weight.nested_quant_map": values,
        ".weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }, numbers  # fmt: skip


GROUP = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}


def _compressed_tensors(kind: str, weights: dict) -> dict:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "format": kind}}
    return {
        "quant_method": "compressed-tensors", "format": kind, "ignore": ["lm_head"], "config_groups": groups,
        "quantization_status": "compressed",
    }  # fmt: skip


#: By name: what config.json says, and how a weight is written.
METHODS: dict[str, tuple[dict, Callable[[torch.Tensor], Written]]] = {
    "fp8": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16], "activation_scheme": "dynamic",
         "modules_to_not_convert": ["lm_head"]}, fp8,
    ),
    "mxfp4": ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}, mxfp4),
    "int4": (_compressed_tensors("pack-quantized", GROUP), int4),
    "int4-asymmetric": (
        _compressed_tensors("pack-quantized", GROUP | {"symmetric": False}), lambda weight: int4(weight, 16, False),
    ),
    "int4-channel": (
        _compressed_tensors(
            "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel", "group_size": None}
        ),
        lambda weight: int4(weight, None),
    ),
    "nvfp4": (
        _compressed_tensors(
            "nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
        ), nvfp4,
    ),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, nf4),
}  # fmt: skip


def shards(directory: Path, tensors: dict[str, torch.Tensor], settings: dict | None) -> CompressedShards:
    save_file({name: value.contiguous() for name, value in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(
        json.dumps({} if settings is None else {"quantization_config": settings})
    )
    return CompressedShards(directory)


def is_written_so(method: str, name: str, value: torch.Tensor) -> bool:
    """Whether a tensor of a plain checkpoint is one that the method compresses: all linear layers but the head, some of
    which stay as they are (``modules_to_not_convert``)."""
    if method == "mxfp4":
        return name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    outside = (
        "embed" in name
        or "lm_head" in name
        or name.endswith(("gate.weight", "layers.0.self_attn.o_proj.weight"))
    )
    return value.dim() == 2 and name.endswith(".weight") and not outside


def compress(plain: Path, directory: Path, method: str) -> Path:
    """Write the checkpoint in ``plain`` to ``directory`` in few bits; return the directory of its twin, next to it."""
    settings, write = METHODS[method]
    twin = directory.with_name(f"{directory.name}-twin")
    packed: dict[str, torch.Tensor] = {}
    numbers: dict[str, torch.Tensor] = {}
    for name, value in load_file(plain / "model.safetensors").items():
        if name.endswith("e_score_correction_bias"):  # a buffer, of zeros in a new model
            value = torch.linspace(-0.02, 0.02, value.numel())
        packed[name] = numbers[name] = value
        if is_written_so(method, name, value):
            written, numbers[name] = write(value)
            del packed[name]
            packed |= {name.removesuffix(".weight") + suffix: one for suffix, one in written.items()}
    for folder, tensors, more in (
        (directory, packed, {"quantization_config": settings}),
        (twin, numbers, {}),
    ):
        folder.mkdir()
        config = json.loads((plain / "config.json").read_text()) | more
        (folder / "config.json").write_text(json.dumps(config))
        save_file(
            {name: one.contiguous() for name, one in tensors.items()},
            folder / "model.safetensors",
            {"format": "pt"},
        )
    return twin
