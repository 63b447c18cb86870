"""Codes and scales become, bit for bit, the numbers that the formats' own libraries make of them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from common.errors import UserError
from tests.common.models.checkpoint.compressed.writing import GROUP, METHODS, fp8, int4, shards

#: What compressed-tensors 0.20.0 has made; ``make_goldens.py`` made the file, and is in git's history.
GOLDENS = Path(__file__).parent / "goldens.safetensors"


def goldens() -> dict[str, dict]:
    with safe_open(GOLDENS, framework="pt") as file:
        settings = json.loads(file.metadata()["settings"])
        keys = list(file.keys())
        for name, case in settings.items():
            case["packed"] = {
                key.removeprefix(f"{name}."): file.get_tensor(key)
                for key in keys
                if key.startswith(f"{name}.")
            }
            case["numbers"] = file.get_tensor(f"{name} numbers")
        return settings


CASES = goldens()


def fp8_settings(**changes) -> dict:
    return METHODS["fp8"][0] | changes


@pytest.mark.parametrize("name", CASES)
def test_equals_compressed_tensors(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    groups = {"group_0": {"targets": ["Linear"], "weights": case["weights"]}}
    settings = {"quant_method": "compressed-tensors", "format": case["format"], "config_groups": groups}
    files = shards(tmp_path, {f"layer.{key}": value for key, value in case["packed"].items()}, settings)
    assert list(files.tensors) == ["layer.weight"]
    found = files.read("layer.weight")
    assert found.dtype == case["numbers"].dtype and torch.equal(found, case["numbers"])
    assert torch.equal(files.read_rows("layer.weight", 3, 7), case["numbers"][3:7])


@pytest.mark.parametrize("shape", [(32, 48), (3, 64, 32)])
@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.uint8])
def test_fp8_equals_transformers(shape: tuple[int, ...], scales: torch.dtype, tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 255, shape, generator=random, dtype=torch.uint8)
    codes[(codes & 127) == 127] = 3  # these are NaN
    codes = codes.view(torch.float8_e4m3fn)
    grid = (*shape[:-2], shape[-2] // 16, shape[-1] // 16)
    scale = torch.randint(100, 140, grid, generator=random, dtype=torch.uint8)
    if scales == torch.float8_e8m0fnu:
        scale = scale.view(scales)
    elif scales != torch.uint8:
        scale = torch.rand(grid, generator=random).to(scales)
    files = shards(tmp_path, {"experts.up": codes, "experts.up_scale_inv": scale}, fp8_settings())
    expected = Fp8Dequantize(None)._dequantize_one(codes, scale, torch.float32)
    assert torch.equal(files.read("experts.up"), expected)
    rounded = Fp8Dequantize(None)._dequantize_one(codes, scale, torch.bfloat16)
    assert torch.equal(files.read("experts.up").bfloat16(), rounded)


def test_fp4_within_fp8_equals_transformers(tmp_path: Path) -> None:
    """Experts of some FP8 checkpoints: two to a byte, with their own blocks."""
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(-128, 127, (16, 32), generator=random, dtype=torch.int8)
    scale = torch.randint(110, 130, (16, 2), generator=random, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    files = shards(tmp_path, {"up.weight": codes, "up.scale": scale}, fp8_settings())
    assert torch.equal(
        files.read("up.weight"), Fp8Dequantize(None)._dequantize_one(codes, scale, torch.float32)
    )


def test_fp8_blocks_at_the_edges(tmp_path: Path) -> None:
    """DeepSeek-V3 has 576 rows in blocks of 128: the last block is smaller, not all of them."""
    weight = torch.randn(40, 24, generator=torch.Generator().manual_seed(0))
    written, numbers = fp8(weight)
    files = shards(tmp_path, {f"kv{suffix}": value for suffix, value in written.items()}, fp8_settings())
    assert written[".weight_scale_inv"].shape == (3, 2) and torch.equal(files.read("kv.weight"), numbers)


def test_mxfp4_equals_transformers(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 2, 16), generator=random, dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 10, 2), generator=random, dtype=torch.uint8)
    files = shards(tmp_path, {"mlp.up_blocks": blocks, "mlp.up_scales": scales}, {"quant_method": "mxfp4"})
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(
            files.read("mlp.up").to(dtype), convert_moe_packed_tensors(blocks, scales, dtype=dtype)
        )


def test_several_groups_of_layers(tmp_path: Path) -> None:
    """Which settings are for a weight its name tells, by a pattern first, and else its being a linear layer."""
    groups = {
        "others": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "channel"}},
        "experts": {"targets": ["re:.*experts.*"], "weights": GROUP},
        "one": {"targets": ["head"], "weights": GROUP | {"group_size": 32}},
    }
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    tensors, numbers = {}, {}
    for name, group in (("attention.q", None), ("experts.0.up", 16), ("head", 32)):
        written, numbers[f"{name}.weight"] = int4(weight, group)
        tensors |= {f"{name}{suffix}": value for suffix, value in written.items()}
    files = shards(tmp_path, tensors, {"quant_method": "compressed-tensors", "config_groups": groups})
    assert files.tensors.keys() == numbers.keys()
    for name, value in numbers.items():
        assert torch.equal(files.read(name), value), name


@pytest.mark.parametrize(("changes", "tensors", "words"), [
    ({"sparsity_config": {"format": "sparse-24-bitmask"}}, {}, "sparse weights"),
    ({"transform_config": {"config_groups": {"R1": {}}}}, {}, "transforms"),
    ({}, {"weight_g_idx": torch.zeros(64, dtype=torch.int32)}, "in another order"),
    ({"config_groups": {"g": {"weights": {"num_bits": 3}}}}, {}, "packed with 3 bits"),
])  # fmt: skip
def test_rejected(changes: dict, tensors: dict[str, torch.Tensor], words: str, tmp_path: Path) -> None:
    settings = METHODS["int4"][0] | changes
    packed = CASES["int4-group"]["packed"] | tensors
    with pytest.raises(UserError, match=words):
        shards(tmp_path, {f"layer.{key}": value for key, value in packed.items()}, settings)
