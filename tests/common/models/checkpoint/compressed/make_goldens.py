"""Make the file that ``test_tensors.py`` compares with: weights as compressed-tensors writes and reads them.

pip install compressed-tensors==0.20.0 && python tests/common/models/checkpoint/compressed/make_goldens.py
"""

import json
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

FILE = Path(__file__).parent / "goldens.safetensors"
ROWS, COLUMNS, GROUP = 24, 64, 32

CASES = {
    "int4-group": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}),
    "int4-group-asymmetric": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": False},
    ),
    "int4-channel": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"}),
    "int4-channel-asymmetric": (
        "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": False},
    ),
    "int8-packed": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "group", "group_size": GROUP}),
    "int8": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "fp8-channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8-tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8-block": (
        "float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]},
    ),
    "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
}  # fmt: skip


def blocks(strategy: str, group: int | None, structure: list[int] | None, columns: int) -> tuple[int, int]:
    if strategy == "block":
        return structure[0], structure[1]
    return {"channel": (1, columns), "tensor": (ROWS, columns)}.get(strategy, (1, group))


def main() -> None:
    tensors, settings = {}, {}
    for number, (name, (kind, wanted)) in enumerate(CASES.items()):
        columns = 60 if name == "int4-channel" else COLUMNS  # does not fill the last word
        weight = torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(number)).bfloat16()
        args = QuantizationArgs(**wanted)
        scheme = QuantizationScheme(targets=["Linear"], weights=args, format=kind)
        height, width = blocks(wanted["strategy"], args.group_size, wanted.get("block_structure"), columns)
        padded = torch.nn.functional.pad(weight, (0, -columns % width, 0, -ROWS % height))
        grid = padded.unflatten(0, (-1, height)).unflatten(2, (-1, width)).transpose(1, 2).flatten(2)
        state = {"weight": weight}
        if name == "nvfp4":
            state["weight_global_scale"] = (448 * 6 / weight.abs().max().float()).reshape(1)
        scale, zero = calculate_qparams(
            grid.amin(-1), grid.amax(-1), args, global_scale=state.get("weight_global_scale")
        )
        if name == "mxfp4":
            scale = torch.exp2(torch.ceil(torch.log2(grid.abs().amax(-1).float() / 6)))
        state["weight_scale"] = scale.reshape(1) if wanted["strategy"] == "tensor" else scale
        if not args.symmetric:
            state["weight_zero_point"] = zero
        compressor = BaseCompressor.get_value_from_registry(kind)
        packed = compressor.compress(dict(state), scheme)
        back = compressor.decompress(dict(packed), scheme)["weight"]
        assert (back.float() - weight.float()).abs().mean() < 0.15, name
        for key, value in packed.items():
            tensors[f"{name}.{key}"] = value.contiguous()
        tensors[f"{name} numbers"] = back.contiguous()
        settings[name] = {"format": kind, "weights": json.loads(args.model_dump_json(exclude_none=True))}
    save_file(tensors, FILE, metadata={"settings": json.dumps(settings)})


if __name__ == "__main__":
    main()
