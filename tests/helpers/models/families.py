"""One tiny configuration per family, with every shape that matters in it: odd vocabularies, grouped heads, experts."""

import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

_COMMON = {
    "vocab_size": 199,
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
_LLAMA = {**_COMMON, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
_LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]
_MOE = {**_LLAMA, "num_experts_per_tok": 2}

FAMILIES: dict[str, dict] = {
    "llama": {**_LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4}},
    "gpt2": {"vocab_size": 199, "n_layer": 3, "n_embd": 32, "n_head": 4, "n_positions": 64},
    "qwen3": {**_LLAMA, "head_dim": 16},
    "gemma3_text": {**_LLAMA, "head_dim": 16, "sliding_window": 8, "layer_types": _LAYERS},
    "opt": {**_COMMON, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    "mistral": {**_LLAMA, "sliding_window": 16},
    "phi3": _LLAMA,
    "gpt_neox": {**_COMMON, "intermediate_size": 48, "max_position_embeddings": 64},
    "mixtral": {**_MOE, "num_local_experts": 4},
    "qwen3_moe": {**_MOE, "num_experts": 8, "moe_intermediate_size": 24, "head_dim": 8},
}  # fmt: skip
MIXED = ("mixtral", "qwen3_moe")  # of experts


def family_config(family: str, **changes: object) -> PreTrainedConfig:
    return AutoConfig.for_model(family, **{**FAMILIES[family], **changes})


def real_model(
    config: PreTrainedConfig, seed: int = 0, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """A model with distinct random weights everywhere, norms and biases too."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape).to(dtype) * 0.1)
    return model


def saved(
    directory: Path, config: PreTrainedConfig, shard: str = "50GB", dtype: torch.dtype = torch.float32
) -> Path:
    """A checkpoint directory, as ``save_pretrained`` writes it."""
    shutil.rmtree(directory, ignore_errors=True)
    real_model(config, dtype=dtype).save_pretrained(directory, max_shard_size=shard)
    return directory


def reset_peak_bytes() -> int:
    """Start measuring this process's peak of resident memory again; returns what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    """The largest resident memory since :func:`reset_peak_bytes`."""
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) << 10
