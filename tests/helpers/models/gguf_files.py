"""GGUF files of small models with random numbers and a tokenizer."""

import json
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from tests.helpers.models.small_checkpoints import SIZES, small_checkpoint

LLAMA = SIZES | {"intermediate_size": 64}
FIELDS: dict[str, int | float | str] = {
    "block_count": 2, "context_length": 64, "embedding_length": 32, "feed_forward_length": 64,
    "attention.head_count": 2, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 1e4,
}  # fmt: skip
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 768}
FAMILIES: dict[str, tuple[PreTrainedConfig, dict[str, int | float | str]]] = {
    "llama": (LlamaConfig(**LLAMA), {}),  # whose queries and keys llama.cpp permutes
    # Tied, and its norms have 1 added
    "gemma2": (Gemma2Config(**LLAMA, head_dim=16), {"attention.key_length": 16}),
    "qwen3_moe": (
        Qwen3MoeConfig(**LLAMA, **EXPERTS, head_dim=16),
        {"attention.key_length": 16, "expert_count": 2, "expert_used_count": 1},
    ),
}


def write_gguf(
    file: Path,
    config: PreTrainedConfig,
    fields: dict[str, int | float | str],
    drop: str = "-",
    architecture: str = "",
    rope_factors: np.ndarray | None = None,
    tokenizer_fields: dict[str, str | bool] | None = None,
    merges: int | None = None,
    kinds: Sequence[str] = ("Q8_0",),
    split: int = 0,
) -> Path:
    """Write a model of a configuration under llama.cpp's names, and return the file.

    Args:
        fields: metadata of the family, by their names without it.
        drop: part of the names of tensors to leave out.
        architecture: llama.cpp's name of the family, if it is not that of ``config``.
        rope_factors: content of the tensor ``rope_freqs.weight``, if there is to be one.
        tokenizer_fields: metadata of the tokenizer besides its vocabulary, by their names without ``tokenizer.ggml.``.
        merges: how many of the tokenizer's merges to write, if not all.
        kinds: types of the matrices, one after the other.
        split: tensors in each part of a file that is split, whose first part is returned; 0: one file.
    """
    import gguf

    checkpoint = small_checkpoint(file.parent / f"{file.stem}-written", config)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(checkpoint),
        AutoTokenizer.from_pretrained(checkpoint),
    )
    family = config.model_type.replace("_moe", "moe").removesuffix("_text")
    architecture = architecture or family
    writer = gguf.GGUFWriter(file, architecture, split_max_tensors=split)
    kind_of = cycle(kinds)
    for name, value in fields.items():
        add = {float: writer.add_float32, str: writer.add_string}.get(type(value), writer.add_uint32)
        add(f"{architecture}.{name}", value)
    words = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    tokenizer_fields = {"model": "gpt2", "pre": "gpt-2"} | (tokenizer_fields or {})
    for name, value in tokenizer_fields.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_string
        add(f"tokenizer.ggml.{name}", value)
    space = "Ġ" if tokenizer_fields["model"] == "gpt2" else "▁"
    writer.add_token_list([word.replace("Ġ", space) for word in words])
    pairs = json.loads((checkpoint / "tokenizer.json").read_text())["model"]["merges"][:merges]
    writer.add_token_merges([" ".join(pair).replace("Ġ", space) for pair in pairs])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(tokenizer.chat_template)
    known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known[family], config.num_hidden_layers)
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            value = value.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(value.shape)
        if family.startswith("gemma") and name.endswith("norm.weight"):
            value = value + 1  # which these models add, and llama.cpp has in the file
        suffix = "bias" if name.endswith(".bias") else "weight"
        parts = {name.removesuffix(f".{suffix}"): value}
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            parts = dict(zip((f"{stem}gate_proj", f"{stem}up_proj"), value.chunk(2, dim=1), strict=True))
        for part, tensor in parts.items():
            stored = names.get_name(part)
            if drop in stored:
                continue
            kind = gguf.GGMLQuantizationType[next(kind_of) if tensor.dim() > 1 else "F32"]
            writer.add_tensor(f"{stored}.{suffix}", quantized(tensor.numpy(), kind), raw_dtype=kind)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(file.parent.glob(f"{file.stem}-00001-of-*.gguf"))[0] if split else file


def quantized(values: np.ndarray, kind: Any) -> np.ndarray:
    """Return values in a type of GGUF; random numbers, instead, in those that the package gguf only reads."""
    import gguf

    try:
        return gguf.quants.quantize(np.ascontiguousarray(values), kind)
    except NotImplementedError:
        return random_blocks(kind, values.shape, np.random.default_rng(values.size))


def random_blocks(kind: Any, shape: Sequence[int], generator: np.random.Generator) -> np.ndarray:
    """Return random codes with scales for which numbers are below 1."""
    import gguf

    numbers, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (*shape[:-1], shape[-1] // numbers, nbytes), dtype=np.uint8)
    for start in {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}.get(kind.name, (0, 2)):
        scales = generator.uniform(1e-5, 1e-4, blocks.shape[:-1]).astype(np.float16)
        blocks[..., start : start + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)
