"""Tiny models whose checkpoints are written in few bits, one for each way in which families put weights together."""

from pathlib import Path

import torch
from transformers import AutoConfig

from tests.common.models.checkpoint.compressed.writing import compress
from tests.helpers.models.families import saved

_COMMON = {
    "vocab_size": 211, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip

FAMILIES: dict[str, dict] = {
    "llama": _COMMON,
    "qwen3_moe": {
        **_COMMON, "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2,
    },
    "deepseek_v3": {
        **_COMMON, "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 32,
        "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    },
    "gpt_oss": {
        **_COMMON, "intermediate_size": 64, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
        "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"],
    },
}  # fmt: skip

#: Family and method: all pairs that people publish.
PAIRS = [
    ("llama", "fp8"), ("deepseek_v3", "fp8"), ("qwen3_moe", "fp8"), ("gpt_oss", "mxfp4"), ("llama", "int4"),
    ("llama", "int4-asymmetric"), ("llama", "int4-channel"), ("deepseek_v3", "int4"), ("qwen3_moe", "nvfp4"),
    ("llama", "nf4"), ("qwen3_moe", "nf4"),
]  # fmt: skip


def compressed(folder: Path, family: str, method: str, **changes: object) -> tuple[Path, Path]:
    """A checkpoint in few bits, and a plain one with the same numbers."""
    config = AutoConfig.for_model(family, **FAMILIES[family] | changes)
    plain = saved(folder / "plain", config, dtype=torch.bfloat16)
    directory = folder / "compressed"
    return directory, compress(plain, directory, method)
