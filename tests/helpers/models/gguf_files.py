"""GGUF files of small models with random numbers and a tokenizer."""

import json
from pathlib import Path

import numpy as np
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from tests.helpers.models.small_checkpoints import small_checkpoint


def write_gguf(
    file: Path, config: PreTrainedConfig, fields: dict[str, int | float], drop: str = "-", architecture: str = ""
) -> Path:
    """Write a model of a configuration under llama.cpp's names, its matrices in 8 bits, and return the file.

    Args:
        fields: metadata of the family, by their names without it.
        drop: part of the names of tensors to leave out.
        architecture: llama.cpp's name of the family, if it is not that of ``config``.
    """
    import gguf

    checkpoint = small_checkpoint(file.parent / f"{file.stem}-written", config)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    family = config.model_type.replace("_moe", "moe")
    architecture = architecture or family
    writer = gguf.GGUFWriter(file, architecture)
    for name, value in fields.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{architecture}.{name}", value)
    words = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    merges = json.loads((checkpoint / "tokenizer.json").read_text())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(tokenizer.chat_template)
    names = gguf.get_tensor_name_map({name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[family], 2)
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        parts = {name.removesuffix(".weight"): value}
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            parts = dict(zip((f"{stem}gate_proj", f"{stem}up_proj"), value.chunk(2, dim=1), strict=True))
        for part, tensor in parts.items():
            stored = names.get_name(part)
            if drop in stored:
                continue
            kind = gguf.GGMLQuantizationType.Q8_0 if tensor.dim() > 1 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(
                f"{stored}.weight", gguf.quants.quantize(np.ascontiguousarray(tensor.numpy()), kind), raw_dtype=kind
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
