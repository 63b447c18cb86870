"""Whole checkpoints in few bits: what is read of them, parameter by parameter, and what is refused."""

import json
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config, PreTrainedModel

from common.errors import UserError
from common.models.checkpoint.compressed import formats
from common.models.checkpoint.compressed.parameters import Placements
from common.models.checkpoint.sources import CheckpointSource
from common.models.checkpoint.writer import CheckpointWriter
from common.models.meta_model import build_meta_model
from common.models.presets import load_config
from tests.common.models.checkpoint.compressed.cases import PAIRS, compressed
from tests.helpers.models.families import peak_bytes, reset_peak_bytes
from tests.helpers.models.rows import rows_are_alike

WEIGHTS = "model.safetensors"


def source_of(directory: Path) -> CheckpointSource:
    return CheckpointSource(directory, build_meta_model(load_config(directory)[0]))


def numbers_of(source: CheckpointSource) -> dict[str, torch.Tensor]:
    source.check()
    return dict(source.read([name for name, _ in source.model.named_parameters()]))


def in_memory(directory: Path, dtype: torch.dtype, **options: object) -> PreTrainedModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, **options)


def rewrite(directory: Path, change) -> None:
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS, {"format": "pt"})


@pytest.mark.parametrize(("family", "method"), PAIRS)
def test_equals_a_plain_checkpoint_with_the_same_numbers(family: str, method: str, tmp_path: Path) -> None:
    directory, twin = compressed(tmp_path, family, method)
    source = source_of(directory)
    found = numbers_of(source)
    assert source.unused == []
    expected = in_memory(twin, torch.float32)
    assert found.keys() == {name for name, _ in expected.named_parameters()}
    for name, parameter in expected.named_parameters():
        assert torch.equal(found[name].float(), parameter), name
        assert rows_are_alike(source, name, found[name]) or parameter.dim() == 2, name
    kept = [name for name in found if source.compressed(name) is not None]
    stays = [
        name
        for name in kept
        if "embed" in name or "lm_head" in name or "norm" in name or ".0.self_attn.o" in name
    ]
    assert kept and not stays
    if family != "llama":
        assert any("experts" in name for name in kept)
    for name in kept:  # there and back in its own bytes
        parameter, value = source.compressed(name), found[name]
        parts = [list(part) for part in source.read_compressed(name)]
        assert parameter.numel == value.numel()
        assert pickle.loads(pickle.dumps(parameter)) == parameter, "as the optimizer process gets it"
        payload = torch.zeros(parameter.nbytes, dtype=torch.uint8)
        parameter.encode(parts, payload)
        files = sum(values.nbytes for part in parts for _, _, values in part)
        assert files <= parameter.nbytes < files + 5 * 128 * len(parameter.offsets)
        flat = torch.full((value.numel(),), torch.nan, dtype=torch.bfloat16)
        parameter.decode(payload, flat)
        assert torch.equal(flat, value.flatten().bfloat16()), name


def test_bytes_are_read_in_ranges_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, _ = compressed(tmp_path, "deepseek_v3", "fp8")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    payloads = []
    for span in (1 << 20, 300):
        monkeypatch.setattr(formats, "SPAN_BYTES", span)
        source = source_of(directory)
        parameter, parts = source.compressed(name), [list(part) for part in source.read_compressed(name)]
        assert all(values.nbytes <= span for part in parts for _, _, values in part)
        payloads.append(torch.zeros(parameter.nbytes, dtype=torch.uint8))
        parameter.encode(parts, payloads[-1])
    assert torch.equal(*payloads) and payloads[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "method"), [("llama", "fp8"), ("deepseek_v3", "fp8"), ("gpt_oss", "mxfp4")]
)
def test_equals_transformers(family: str, method: str, dtype: torch.dtype, tmp_path: Path) -> None:
    # transformers 5.23 cannot read blocks that are smaller at the edges, which DeepSeek-V3's own checkpoint has.
    directory, _ = compressed(
        tmp_path, family, method, **{"qk_rope_head_dim": 16} if family == "deepseek_v3" else {}
    )
    how = FineGrainedFP8Config(dequantize=True) if method == "fp8" else Mxfp4Config(dequantize=True)
    expected = in_memory(directory, dtype, quantization_config=how)
    source = source_of(directory)
    found = numbers_of(source)
    for name, parameter in expected.named_parameters():
        assert parameter.dtype == dtype or source.compressed(name) is None  # it leaves plain ones as they are
        assert torch.equal(found[name].to(parameter.dtype), parameter), name


def test_kimi_k2_and_deepseeks_own_files(tmp_path: Path) -> None:
    """A type that transformers does not know, of a class that it knows; and a layer that predicts a second token."""
    directory, twin = compressed(tmp_path, "deepseek_v3", "fp8")
    fields = json.loads((directory / "config.json").read_text())
    fields |= {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    (directory / "config.json").write_text(json.dumps(fields))
    second = {}

    def add(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.1.")]:
            second[name.replace("layers.1.", "layers.2.")] = tensors[name].clone()
        tensors |= second

    rewrite(directory, add)
    source = source_of(directory)
    found = numbers_of(source)
    assert set(source.unused) <= second.keys()
    for name, parameter in in_memory(twin, torch.float32).named_parameters():
        assert torch.equal(found[name].float(), parameter), name


def test_a_conversion_that_is_not_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers makes of experts in any other way it makes here, too: of all their numbers at once."""
    directory, _ = compressed(tmp_path, "deepseek_v3", "fp8")
    source = source_of(directory)
    expected = numbers_of(source)
    monkeypatch.setattr(Placements, "place", lambda *_: None)
    assert all(source.compressed(name) is None for name in expected)
    for name, value in numbers_of(source).items():
        assert torch.equal(value, expected[name]), name


def test_memory_is_that_of_one_parameter(tmp_path: Path) -> None:
    """All experts' numbers in fp32, and of their bytes one expert's at a time."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 64, "num_hidden_layers": 1}
    directory, _ = compressed(tmp_path, "qwen3_moe", "fp8", **sizes)
    source = source_of(directory)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    list(source.read(["model.layers.0.mlp.experts.down_proj"]))  # what libraries need once
    before = reset_peak_bytes()
    ((_, value),) = source.read([name])
    assert value.nbytes == 64 * 512 * 256 * 4
    assert peak_bytes() - before < value.nbytes + (8 << 20)


def test_the_export_is_plain(tmp_path: Path) -> None:
    directory, _ = compressed(tmp_path, "llama", "fp8")
    config, _ = load_config(directory)
    model = build_meta_model(config)
    source = CheckpointSource(directory, model)
    writer = CheckpointWriter(tmp_path / "out", model, config, torch.bfloat16, 1 << 30)
    found = numbers_of(source)
    writer.add(found)
    writer.finish()
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    for name, parameter in in_memory(tmp_path / "out", torch.bfloat16).named_parameters():
        assert torch.equal(parameter, found[name].bfloat16())


def test_codes_without_scales(tmp_path: Path) -> None:
    directory, _ = compressed(tmp_path, "llama", "fp8")
    rewrite(directory, lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight_scale_inv"))
    with pytest.raises(
        UserError, match=r"layers\.0\.mlp\.up_proj\.weight as torch\.float8_e4m3fn.* no scales"
    ):
        source_of(directory).check()


@pytest.mark.parametrize("method", ["gptq", "awq", "hqq", "fbgemm_fp8"])
def test_other_methods_are_rejected(method: str, tmp_path: Path) -> None:
    directory, _ = compressed(tmp_path, "llama", "fp8")
    content = json.loads((directory / "config.json").read_text())
    content["quantization_config"] = {"quant_method": method, "bits": 4, "load_in_4bit": True}
    (directory / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=rf"quantized \({method}\), and of quantized checkpoints only FP8"):
        load_config(directory)
