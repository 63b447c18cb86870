"""Checkpoints in few bits, out of core: trained as plain numbers, or frozen in their own bytes."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from common.models.adapters.options import AdapterOptions
from common.models.presets import load_config
from fuyou.layout.frozen_weights import FrozenDtype
from fuyou.layout.record import Kind, Precision
from fuyou.model.open_model import OpenModel
from fuyou.planner import describe_training
from tests.common.models.checkpoint.compressed.cases import PAIRS, compressed
from tests.common.models.checkpoint.compressed.writing import is_written_so
from tests.helpers.adapters import DTYPES, InMemory, compare, train
from tests.helpers.engines import batches, check, directories
from tests.helpers.engines import engine as plain_engine

pytestmark = pytest.mark.filterwarnings("ignore")
NOT_STORED = ("weight_shape", ".weight.quant_map", "__nf4")  # What decoding does not need
BF16 = Precision(torch.bfloat16)


@pytest.mark.parametrize(("family", "method", "dtype", "micro", "targets"), [
    ("deepseek_v3", "fp8", "bf16", 2, ["all-linear"]),  # experts as well, as peft has it
    pytest.param("gpt_oss", "mxfp4", "bf16", 4, ["q_proj", "gate_up_proj", "down_proj"], marks=pytest.mark.slow),
    pytest.param("llama", "int4-asymmetric", "fp32", 4, ["all-linear"], marks=pytest.mark.slow),
    ("llama", "nf4", "bf16", 2, ["all-linear"]),
    pytest.param("qwen3_moe", "nf4", "fp32", 2, ["all-linear"], marks=pytest.mark.slow),
    pytest.param("qwen3_moe", "nvfp4", "bf16", 3, ["all-linear"], marks=pytest.mark.slow),
])  # fmt: skip
def test_lora_equals_the_plain_twin_in_memory(
    family: str, method: str, dtype: str, micro: int, targets: list[str], tmp_path: Path
) -> None:
    """Losses, norms and adapters, bit for bit, and again after a resume; the bytes moved are those planned; and merging
    gives what peft makes of the twin."""
    directory, twin_directory = compressed(tmp_path, family, method)
    real = AutoModelForCausalLM.from_pretrained(twin_directory, dtype=DTYPES[dtype])
    torch.manual_seed(0)
    fused = [name for name in targets if name not in ("all-linear", "q_proj")]
    config = AdapterOptions(4, targets=tuple(name for name in targets if name not in fused)).peft_config()
    config.target_parameters = fused or None
    twin = InMemory(get_peft_model(real, config))
    options = {"adapters": AdapterOptions(4, targets=tuple(targets)), "micro_batch": micro}
    ssd, feed = directories(tmp_path, 2), batches(3, packed=False)
    with plain_engine(directory, ssd, dtype, **options) as trained:
        kept = {record.frozen for record in trained._run.layout.records if record.kind is Kind.BLOCK}
        assert FrozenDtype.CHECKPOINT in kept
        experts = [name for name in trained._run.layout.records[-1].trained_names if "experts" in name]
        assert bool(experts) is (family != "llama")
        train(trained, twin, feed[:2], micro)
        trained.flush()
        assert trained.io_bytes() == trained.planned_io_bytes()
    with plain_engine(directory, ssd, dtype, resume=True, **options) as trained:
        train(trained, twin, feed[2:], micro)
        compare(trained, twin.model.get_base_model())
        trained.save_pretrained(tmp_path / "adapter", merge=True)
    merged = tmp_path / "adapter" / "merged"
    assert "quantization_config" not in json.loads((merged / "config.json").read_text())
    plain = AutoModelForCausalLM.from_pretrained(twin_directory, dtype=DTYPES[dtype])
    expected = PeftModel.from_pretrained(plain, tmp_path / "adapter").merge_and_unload()
    found = AutoModelForCausalLM.from_pretrained(merged, dtype=DTYPES[dtype])
    for name, value in expected.named_parameters():
        assert torch.equal(found.get_parameter(name), value), name


@pytest.mark.parametrize(
    ("family", "method", "dtype"), [("deepseek_v3", "fp8", "bf16"), ("gpt_oss", "mxfp4", "fp32")]
)
def test_all_weights_equal_the_plain_twin(family: str, method: str, dtype: str, tmp_path: Path) -> None:
    directory, twin = compressed(tmp_path, family, method)
    check(
        twin,
        directories(tmp_path, 1),
        dtype=dtype,
        micro_batch=4,
        packed=False,
        steps=2,
        trained_from=directory,
    )


def test_int8_of_a_compressed_checkpoint(tmp_path: Path) -> None:
    """What is requested wins: its numbers are rounded as any others."""
    directory, twin = compressed(tmp_path, "llama", "fp8")
    found = []
    for number, model in enumerate((directory, twin)):
        ssd = tmp_path / f"drive{number}"
        ssd.mkdir()
        with plain_engine(model, [ssd], adapters=AdapterOptions(4), frozen_dtype="int8") as trained:
            found.append(dict(trained.named_parameters()))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def opened(directory: Path, frozen: FrozenDtype | None = None) -> OpenModel:
    config, checkpoint = load_config(directory)
    adapters = AdapterOptions(4, targets=("all-linear",)).peft_config()
    return OpenModel(config, BF16, torch.device("cpu"), adapters, frozen=frozen, checkpoint=checkpoint)


@pytest.mark.parametrize(("family", "method"), PAIRS)
def test_bytes_are_those_of_the_files(family: str, method: str, tmp_path: Path) -> None:
    """And nothing but what aligns them: of every block, in the store, in a plan, and on the way to the device."""
    directory, _ = compressed(tmp_path, family, method)
    files = load_file(directory / "model.safetensors")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    model = opened(directory)
    for layer, (index,) in enumerate(model.layout.blocks):
        record = model.layout.records[index]
        inside = [
            name for name in files if f"model.layers.{layer}." in name and not name.endswith(NOT_STORED)
        ]
        buffers = [name for name in inside if name.endswith("e_score_correction_bias")]
        wanted = sum(files[name].nbytes for name in inside) - sum(files[name].nbytes for name in buffers)
        parts = len(inside) + len(record.parameters)
        assert record.frozen is FrozenDtype.CHECKPOINT and wanted <= record.device_nbytes
        assert record.device_nbytes < wanted + 128 * parts + 4096
        assert pickle.loads(pickle.dumps(record)) == record
        decoded = sum(
            2 * value.numel()
            for name, value in plain.items()
            if f"model.layers.{layer}." in name and is_written_so(method, name, value)
        )
        assert record.decoded_nbytes >= decoded
    planned = describe_training(
        directory, 4, 32, adapters=AdapterOptions(4, targets=("all-linear",)).peft_config()
    )
    assert [record.device_nbytes for record in planned.layout.records] == [
        record.device_nbytes for record in model.layout.records
    ]
    assert opened(directory).fingerprint == model.fingerprint
    whole = opened(directory, FrozenDtype.PLAIN)
    assert whole.layout.decoded_nbytes == 0 and whole.fingerprint != model.fingerprint


def test_parameters_of_ones_choice(tmp_path: Path) -> None:
    """What is trained is made plain numbers of, and what is frozen next to it keeps its bytes."""
    directory, _ = compressed(tmp_path, "llama", "fp8")
    config, checkpoint = load_config(directory)
    chosen = ["model.layers.0.*", "model.layers.1.mlp.up_proj.weight"]
    model = OpenModel(config, BF16, torch.device("cpu"), trainable=chosen, frozen=None, checkpoint=checkpoint)
    first, second = (model.layout.records[index] for (index,) in model.layout.blocks)
    assert first.trainable and first.frozen is FrozenDtype.PLAIN
    assert not second.trainable and second.frozen is FrozenDtype.CHECKPOINT
    assert {slot.name for slot in second.parameters if slot.compressed is None} == {
        "model.layers.1.input_layernorm.weight", "model.layers.1.post_attention_layernorm.weight",
    }  # fmt: skip
