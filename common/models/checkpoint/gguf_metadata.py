"""Metadata of GGUF files that transformers leaves out: each key is applied to the configuration, or refused.

transformers has a table of keys for each architecture and drops all others. A dropped key changes what is computed: a
file with scaled rotary embeddings, for instance, would be trained without the scaling.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedConfig
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

ROPE_FACTORS = "rope_freqs.weight"  # Tensor of Llama 3.1 and later: what divides each frequency

# Keys that say the same as an attribute of the configuration; the first attribute that it has counts.
_ATTRIBUTES = {
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("v_head_dim", "head_dim"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_shared_count": ("n_shared_experts",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "leading_dense_block_count": ("first_k_dense_replace",),
    "logit_scale": ("logit_scale",),
    "rope.freq_base": ("rope_theta",),
    "vocab_size": ("vocab_size",),
}
# Keys that change nothing that is computed.
_WITHOUT_EFFECT = {"context_length", "rope.scaling.finetuned", "tensor_data_layout", "feed_forward_length"}


def apply_metadata(config: PreTrainedConfig, architecture: str, keys: dict[str, Any]) -> None:
    """Change ``config``, as transformers made it of a GGUF file, to what the file's own metadata say.

    Args:
        architecture: the file's name of its architecture, which begins the names of ``keys``.
        keys: values of all metadata by name.

    Raises:
        ValueError: if a key cannot be applied to this family's configuration.
    """
    prefix = f"{architecture}."
    left = {name.removeprefix(prefix): value for name, value in keys.items() if name.startswith(prefix)}
    for name in _WITHOUT_EFFECT | _used_by_transformers(architecture):
        left.pop(name, None)
    _apply_bases(config, left, keys.get(f"{prefix}rope.freq_base"))
    _apply_scaling(config, left)
    _apply_window(config, left, int(keys.get(f"{prefix}context_length", 0)))
    _check_rotated(config, left)
    for name, value in left.items():
        attribute = next((each for each in _ATTRIBUTES.get(name, ()) if hasattr(config, each)), None)
        if attribute is not None:
            setattr(config, attribute, value)
        elif value:  # 0, False, and an empty text ask for nothing
            raise ValueError(f"it has {prefix}{name} = {value}, which {type(config).__name__} cannot express")


def apply_rope_factors(config: PreTrainedConfig, factors: npt.NDArray[np.float32]) -> None:
    """Change ``config`` to the scaling of Llama 3.1 that the tensor ``rope_freqs.weight`` was computed from.

    Raises:
        ValueError: if it was computed in another way.
    """
    if np.all(factors == 1):
        return
    rope = dict(config.rope_parameters)
    scaling = {
        "rope_type": "llama3",
        "factor": round(float(factors.max()), 4),  # stored in fp32
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if "rope_theta" not in rope or not np.allclose(
        factors, _llama3_factors(rope["rope_theta"], scaling, len(factors))
    ):
        raise ValueError(f"its {ROPE_FACTORS} scales rotary embeddings in another way than Llama 3.1")
    config.rope_parameters = rope | scaling


def _llama3_factors(base: float, scaling: dict[str, Any], count: int) -> npt.NDArray[np.float64]:
    """Return what Llama 3.1 divides its ``count`` frequencies by."""
    lengths = 2 * math.pi * base ** (np.arange(count) / count)
    low = scaling["low_freq_factor"]
    high = scaling["high_freq_factor"]
    smooth = (scaling["original_max_position_embeddings"] / lengths - low) / (high - low)
    smooth = np.clip(smooth, 0, 1)  # 1: short wavelengths, which stay as they are
    factors: npt.NDArray[np.float64] = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    return factors


def _used_by_transformers(architecture: str) -> set[str]:
    """Return the keys that transformers reads of this architecture, which it spells ``qwen3_moe`` for ``qwen3moe``."""

    def plain(name: str) -> str:
        return name.replace("_", "").replace("-", "")

    mapping: dict[str, Any] = GGUF_CONFIG_MAPPING
    tables = [table for name, table in mapping.items() if plain(name) == plain(architecture)]
    return {key for table in tables for key, attribute in table.items() if attribute is not None}


def _apply_bases(config: PreTrainedConfig, left: dict[str, Any], base: float | None) -> None:
    """Apply the bases of rotary embeddings with and without a window, and take the key of the former from ``left``."""
    rope = getattr(config, "rope_parameters", None) or {}
    if "full_attention" not in rope:
        return
    bases = {"full_attention": base, "sliding_attention": left.pop("rope.freq_base_swa", None)}
    given = {
        kind: {"rope_theta": value} for kind, value in bases.items() if value is not None and kind in rope
    }
    config.rope_parameters = rope | {kind: rope[kind] | value for kind, value in given.items()}


def _apply_scaling(config: PreTrainedConfig, left: dict[str, Any]) -> None:
    """Apply scaled rotary embeddings (``rope.scaling.*``), and take their keys from ``left``."""
    names = [name for name in left if name.startswith("rope.scaling.")]
    given = {name.removeprefix("rope.scaling."): left.pop(name) for name in names}
    factor = float(given.pop("factor", 0) or left.pop("rope.scale_linear", 0) or 1)
    kind = given.pop("type", "linear" if factor != 1 else "none")
    original = given.pop("original_context_length", None)
    if kind == "none" or (kind == "linear" and factor == 1):
        return
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        if original is None:
            raise ValueError("its rotary embeddings are scaled by YaRN without the original context length")
        scaling["original_max_position_embeddings"] = int(original)
        if (attention := given.pop("attn_factor", given.pop("yarn_attn_factor", 1.0))) != 1:
            # llama.cpp multiplies YaRN's own factor; transformers takes the product.
            scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1)
        for name in ("beta_fast", "beta_slow"):
            if (value := given.pop(f"yarn_{name}", None)) is not None:
                scaling[name] = float(value)
    elif kind != "linear":
        raise ValueError(f"its rotary embeddings are scaled by {kind}, which is not read from GGUF files")
    if any(given.values()):
        raise ValueError(f"its rotary embeddings are scaled with {given}, which is not read from GGUF files")
    rope = dict(config.rope_parameters)
    if "full_attention" not in rope:
        config.rope_parameters = rope | scaling
    elif config.model_type.startswith("gemma3"):  # llama.cpp scales only layers without a window
        config.rope_parameters = rope | {"full_attention": rope["full_attention"] | scaling}
    else:
        raise ValueError(
            f"its rotary embeddings are scaled, and {type(config).__name__} has several kinds of them"
        )


def _apply_window(config: PreTrainedConfig, left: dict[str, Any], context: int) -> None:
    """Apply a sliding window, and take its key from ``left``."""
    window = left.pop("attention.sliding_window", 0)
    if not window or window >= context > 0:
        return
    if not hasattr(config, "sliding_window"):
        raise ValueError(f"it has a sliding window of {window}, which {type(config).__name__} cannot express")
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and "sliding_attention" not in kinds:
        raise ValueError(f"it has a sliding window of {window}, and does not say which layers of it have one")
    config.sliding_window = window


def _check_rotated(config: PreTrainedConfig, left: dict[str, Any]) -> None:
    """Refuse a rotated part of each head that differs from the family's, and take its key from ``left``."""
    rotated = left.pop("rope.dimension_count", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if rotated is None or "full_attention" in rope:
        return
    width = left.get("attention.key_length") or getattr(config, "head_dim", None)
    width = width or config.hidden_size // config.num_attention_heads
    part = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1
    if rotated != int(width * part):
        raise ValueError(
            f"it rotates {rotated} of {width} elements of each head, and the family {int(width * part)}"
        )
