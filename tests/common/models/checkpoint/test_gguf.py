"""GGUF files give the weights that transformers reads from them, bit for bit."""

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from common.errors import UserError
from common.files import CACHE_VARIABLE
from common.models.checkpoint.sources import CheckpointSource
from common.models.meta_model import build_meta_model
from common.models.presets import load_config
from tests.helpers.models.gguf_files import write_gguf
from tests.helpers.models.small_checkpoints import SIZES

pytest.importorskip("gguf")
LLAMA = SIZES | {"intermediate_size": 64}
FIELDS: dict[str, int | float] = {
    "block_count": 2, "context_length": 64, "embedding_length": 32, "feed_forward_length": 64,
    "attention.head_count": 2, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 1e4,
}  # fmt: skip
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 768}
FAMILIES: dict[str, tuple[PreTrainedConfig, dict[str, int | float]]] = {
    "llama": (LlamaConfig(**LLAMA), {}),  # whose queries and keys llama.cpp permutes
    "gemma2": (Gemma2Config(**LLAMA, head_dim=16), {"attention.key_length": 16}),  # tied, and its norms have 1 added
    "qwen3_moe": (
        Qwen3MoeConfig(**LLAMA, **EXPERTS, head_dim=16),
        {"attention.key_length": 16, "expert_count": 2, "expert_used_count": 1},
    ),
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_that_transformers_reads(family: str, tmp_path: Path) -> None:
    config, fields = FAMILIES[family]
    file = write_gguf(tmp_path / "model.gguf", config, FIELDS | fields)
    read, directory = load_config(file)
    assert directory is not None
    source = CheckpointSource(directory, build_meta_model(read))
    source.check()
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32).state_dict()
    for name, value in source.read(list(source.shapes)):
        assert torch.equal(value, expected[name]), name
    loaded = AutoModelForCausalLM.from_pretrained(directory).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.items())
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.chat_template and tokenizer.eos_token_id == 2

    weights = directory / "model.safetensors"
    written = weights.stat().st_mtime_ns
    assert load_config(tmp_path / "model.gguf")[1] == directory and weights.stat().st_mtime_ns == written


def test_what_cannot_be_read_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "broken.gguf").write_bytes(b"GGUF, but not really")
    with pytest.raises(UserError, match=r"transformers cannot read .*broken\.gguf: "):
        load_config(tmp_path / "other")
    folder = tmp_path / "two"
    folder.mkdir()
    file = write_gguf(folder / "a.gguf", FAMILIES["llama"][0], FIELDS, drop="ffn_up")
    with pytest.raises(UserError, match=r"cannot read .*a\.gguf: it lacks model\.layers\.0\.mlp\.up_proj\.weight"):
        load_config(file)
    (folder / "b.gguf").write_bytes(b"")
    with pytest.raises(UserError, match=r"has 2 GGUF files: give one of them"):
        load_config(folder)
    with pytest.raises(UserError, match="GGUF model with architecture rwkv7 is not supported"):
        load_config(write_gguf(tmp_path / "rwkv.gguf", FAMILIES["llama"][0], FIELDS, architecture="rwkv7"))
