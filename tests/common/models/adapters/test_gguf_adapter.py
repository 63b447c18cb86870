"""Adapters for llama.cpp: added to the weights of a GGUF file, they make those that peft's merge makes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma3Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
)

from common.files import CACHE_VARIABLE
from common.models.adapters.adapters import Adapters
from common.models.adapters.gguf_adapter import FILE
from common.models.adapters.options import AdapterOptions
from common.models.checkpoint.sources import CheckpointSource
from common.models.meta_model import build_meta_model
from common.models.presets import load_config
from tests.helpers.models.gguf_files import FAMILIES, FIELDS, LLAMA, write_gguf

gguf = pytest.importorskip("gguf")
GROUPED = LLAMA | {"num_attention_heads": 4, "num_key_value_heads": 2}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 28, "patch_size": 14}  # fmt: skip
GROUPED_FIELDS = FIELDS | {"attention.head_count": 4}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


def adapted(config: PreTrainedConfig, **changes: Any) -> tuple[Adapters, dict[str, torch.Tensor]]:
    """Return adapters of a model, and random values of them."""
    options = AdapterOptions(4, 6.0, targets=("all-linear",)).peft_config()
    for name, value in changes.items():
        setattr(options, name, value)
    adapters = Adapters(build_meta_model(config), options, seed=0)
    generator = torch.Generator().manual_seed(0)
    shapes = {name: adapters.model.get_parameter(name).shape for name in adapters.trainable_names}
    return adapters, {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def as_llama_cpp(file: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return metadata of an adapter, and what llama.cpp adds to the numbers of each tensor."""
    reader = gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    factors = {tensor.name: tensor.data for tensor in reader.tensors}
    added = {}
    for name in {name.rpartition(".")[0] for name in factors}:
        a, b = factors[f"{name}.lora_a"], factors[f"{name}.lora_b"]
        a = a.T if name == "token_embd.weight" else a  # whose rows it looks up
        added[name] = fields["adapter.lora.alpha"] / b.shape[-1] * (b @ a)
        added[name] = added[name].T if name == "token_embd.weight" else added[name]
    return fields, added


@pytest.mark.parametrize(("family", "changes"), [
    ("llama", {"target_modules": ["q_proj", "k_proj", "down_proj", "lm_head"]}),
    ("llama", {"target_modules": ["k_proj", "embed_tokens"], "rank_pattern": {"k_proj": 2}, "use_rslora": True}),
    ("gemma2", {}),
])  # fmt: skip
def test_the_merged_weights_are_those_of_peft(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    config, fields = {
        "llama": (LlamaConfig(**GROUPED, tie_word_embeddings=False), GROUPED_FIELDS),
        "gemma2": (FAMILIES["gemma2"][0], FIELDS | FAMILIES["gemma2"][1]),
    }[family]
    base = write_gguf(tmp_path / "model.gguf", config, fields, kinds=("F32",))
    read, directory = load_config(base)
    assert directory is not None
    adapters, values = adapted(read, **changes)
    adapters.save(tmp_path / "adapter", values, checkpoint=directory)
    metadata, added = as_llama_cpp(tmp_path / "adapter" / FILE)
    assert metadata["general.type"] == "adapter" and metadata["adapter.type"] == "lora"
    assert metadata["general.architecture"] == family
    weights = CheckpointSource(directory, build_meta_model(read))
    before = {name: value.clone() for name, value in weights.read(list(weights.shapes))}
    names = {base_name: now for now, base_name in adapters.base_names.items()}
    expected = adapters.merge({names[name]: value.clone() for name, value in before.items()} | values)

    with base.open("r+b") as file:
        # The products are added in the file, and read back in the model's order of rows
        for tensor in gguf.GGUFReader(base).tensors:
            if tensor.name in added:
                file.seek(int(tensor.data_offset))
                file.write((np.array(tensor.data) + added[tensor.name]).astype(np.float32).tobytes())
    found = dict(weights.read(list(weights.shapes)))
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5)
    assert sum(not torch.equal(value, before[name]) for name, value in found.items()) == len(added) >= 3


def test_conv1d_layers_and_a_family_by_its_name_in_llama_cpp(tmp_path: Path) -> None:
    """Without a GGUF file: the family is enough."""
    gpt2 = GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, vocab_size=384)
    for config, name, shape in (
        (gpt2, "blk.1.attn_qkv.weight", (96, 32)),
        (MistralConfig(**GROUPED), "blk.0.attn_k.weight", (16, 32)),
    ):
        adapters, values = adapted(config, fan_in_fan_out=config is gpt2)
        adapters.save(tmp_path / config.model_type, values)
        metadata, added = as_llama_cpp(tmp_path / config.model_type / FILE)
        assert metadata["general.architecture"] == ("gpt2" if config is gpt2 else "llama")
        assert added[name].shape == shape


@pytest.mark.parametrize(("config", "changes", "why"), [
    (GraniteConfig(**LLAMA), {}, "how llama.cpp stores the weights of granite is not known here"),
    (Gemma3Config(text_config=LLAMA, vision_config=VISION), {}, "the names of adapters in llama.cpp are known of lang"),
    (LlamaConfig(**LLAMA), {"use_dora": True}, "llama.cpp has no adapters for model.layers.0.mlp.down_proj.lora_mag"),
    (LlamaConfig(**LLAMA), {"lora_bias": True}, "llama.cpp has no adapters for model.layers.0.mlp.down_proj.lora_B"),
    (Gemma2Config(**LLAMA, head_dim=16), {"target_modules": ["lm_head"]}, "llama.cpp has no adapters for lm_head"),
    (Gemma2Config(**LLAMA, head_dim=16), {"target_modules": ["embed_tokens"]}, "llama.cpp adapts embeddings as the"),
    (FAMILIES["qwen3_moe"][0], {}, "llama.cpp has no adapters for model.layers.0.mlp.experts"),
])  # fmt: skip
def test_what_llama_cpp_cannot_load_is_not_written(
    config: PreTrainedConfig, changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    """An older adapter's file goes."""
    adapters, values = adapted(config, **changes)
    assert adapters.gguf.obstacle.startswith(why)
    (tmp_path / FILE).write_bytes(b"")
    adapters.save(tmp_path, values)
    assert (tmp_path / "adapter_model.safetensors").is_file() and not (tmp_path / FILE).exists()
