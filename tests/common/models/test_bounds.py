"""A configuration that describes an absurd model ends in a sentence, before it takes memory or minutes."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoConfig, GPT2Config, LlamaConfig

from common.errors import UserError
from common.models import bounds
from common.models.bounds import check_counts
from common.models.checkpoint.shards import SINGLE
from common.models.meta_model import build_meta_model
from common.models.presets import load_config

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip
MOE: dict[str, Any] = {**LLAMA, "model_type": "qwen3_moe", "num_experts": 2, "moe_intermediate_size": 8}


def checkpoint(folder: Path, content: dict[str, Any], tensors: int = 20) -> Path:
    (folder / "config.json").write_text(json.dumps(content))
    save_file({f"model.{number}": torch.zeros(8, 8) for number in range(tensors)}, folder / SINGLE)
    return folder


@pytest.mark.parametrize("changes", [
    {"num_hidden_layers": 10**9}, {"num_hidden_layers": 10**6}, {"num_hidden_layers": 9_999}, {"num_labels": 10**9},
    {"hidden_size": 10**9}, {"hidden_size": 10**12}, {"intermediate_size": 10**9}, {"vocab_size": 10**10},
    {"num_attention_heads": 10**9}, {"head_dim": 10**9}, {"text_config": {"num_hidden_layers": 10**9}},
    {"layers": [10**9]}, {**MOE, "num_experts": 10**6}, {**MOE, "num_experts": 99_999, "moe_intermediate_size": 10**5},
])  # fmt: skip
def test_a_configuration_that_the_files_cannot_be_of_is_refused(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    folder = checkpoint(tmp_path, LLAMA | changes)
    started = time.process_time()
    with pytest.raises(UserError, match=r"config\.json|cannot build this"):
        build_meta_model(load_config(folder)[0], checkpoint=folder)
    assert time.process_time() - started < 5


def test_the_message_has_both_sizes(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, LLAMA | {"num_hidden_layers": 9_999}, tensors=2)
    with pytest.raises(UserError, match=r"at least 265 tensors with [\d,]+ numbers, .* names of 2 tensors"):
        build_meta_model(load_config(folder)[0], checkpoint=folder)


def test_a_configuration_alone_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "_MOST_PARAMETERS", 50)
    with pytest.raises(UserError, match="a model of more than 50 parameter tensors"):
        build_meta_model(LlamaConfig(**(LLAMA | {"num_hidden_layers": 9_999})))
    build_meta_model(LlamaConfig(**LLAMA))
    with pytest.raises(UserError, match="This 'llama' configuration says num_hidden_layers = 1,000,000"):
        build_meta_model(LlamaConfig(**(LLAMA | {"num_hidden_layers": 10**6})))


def test_buffers_have_a_bound() -> None:
    """GPT-Neo's masks are as wide and as high as its context is long."""
    config = AutoConfig.for_model(
        "gpt_neo", num_layers=2, hidden_size=8, num_heads=1, attention_types=[[["global"], 2]]
    )
    config.max_position_embeddings = 1 << 20
    with pytest.raises(UserError, match=r"buffers of 2 TiB, of which \S+ takes 1 TiB"):
        build_meta_model(config)


def test_configurations_of_all_families_pass() -> None:
    for kind in ("llama", "gpt2", "doge", "muse_spark", "gemma3n", "qwen3_moe", "deepseek_v3", "nemotron_h"):
        if kind in CONFIG_MAPPING:
            check_counts(CONFIG_MAPPING[kind]().to_dict(), kind)
    check_counts(GPT2Config(n_layer=10_000, num_labels=30_000).to_dict(), "gpt2")


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "generation_config.json", "chat_template.jinja", "x.safetensors"]
)
def test_files_of_a_checkpoint_are_regular(tmp_path: Path, name: str) -> None:
    folder = checkpoint(tmp_path, LLAMA)
    os.mkfifo(folder / name)
    with pytest.raises(UserError, match=f"{name} cannot be read: it is not a regular file"):
        load_config(folder)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "vocab.txt", "model.safetensors.index.json"]
)
def test_files_of_a_checkpoint_have_a_size(tmp_path: Path, name: str) -> None:
    folder = checkpoint(tmp_path, LLAMA)
    with (folder / name).open("ab") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(UserError, match=f"{name} has 1,099,511,627,776 bytes"):
        load_config(folder)
