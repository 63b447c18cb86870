"""llama.cpp with ``adapter.gguf`` answers as transformers does with the same adapters and peft.

Needs llama-cpp-python, which takes minutes to compile: without it, nothing here runs.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from common.files import CACHE_VARIABLE
from common.models.adapters.adapters import Adapters
from common.models.adapters.gguf_adapter import FILE
from common.models.adapters.options import AdapterOptions
from common.models.meta_model import build_meta_model
from common.models.presets import load_config
from tests.helpers.models.gguf_files import FIELDS, LLAMA, write_gguf

pytest.importorskip("gguf")
llama_cpp = pytest.importorskip("llama_cpp")
TOKENS = [5, 17, 99, 200, 31, 64, 7, 150, 44, 12]
GROUPED = LLAMA | {"num_attention_heads": 4, "num_key_value_heads": 2}
GROUPED_FIELDS = FIELDS | {"attention.head_count": 4}
HEAD = {"attention.key_length": 16, "attention.value_length": 16}
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "attention.sliding_window": 4096}


def answers(model: Path, adapter: Path | None) -> np.ndarray:
    """Return llama.cpp's logits, ``[S, V]``."""
    lora = None if adapter is None else str(adapter / FILE)
    loaded = llama_cpp.Llama(str(model), lora_path=lora, n_ctx=64, logits_all=True, verbose=False)
    loaded.eval(TOKENS)
    return np.array(loaded.scores[: len(TOKENS)])


@pytest.mark.parametrize(("config", "fields"), [
    (LlamaConfig(**GROUPED, tie_word_embeddings=False), GROUPED_FIELDS),
    (Qwen2Config(**GROUPED | {"vocab_size": 385}), GROUPED_FIELDS),  # as many tokens as its tokenizer has
    (Qwen3Config(**GROUPED, head_dim=16), GROUPED_FIELDS | HEAD),
    (Gemma2Config(**LLAMA, head_dim=16, query_pre_attn_scalar=16), FIELDS | HEAD | CAPS),
], ids=lambda value: getattr(value, "model_type", ""))  # fmt: skip
def test_logits_with_an_adapter(
    config: PreTrainedConfig,
    fields: dict[str, int | float | str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    file, folder = write_gguf(tmp_path / "model.gguf", config, fields, kinds=("F32",)), tmp_path / "adapter"
    read, directory = load_config(file)
    adapters = Adapters(
        build_meta_model(read), AdapterOptions(4, targets=("all-linear",)).peft_config(), seed=0
    )
    generator = torch.Generator().manual_seed(0)
    shapes = {name: adapters.model.get_parameter(name).shape for name in adapters.trainable_names}
    values = {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    adapters.save(folder, values, checkpoint=directory)

    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model-written", dtype=torch.float32).eval()
    ids = torch.tensor([TOKENS])
    with torch.no_grad():
        without = plain(input_ids=ids).logits[0].numpy()
        expected = PeftModel.from_pretrained(plain, str(folder)).eval()(input_ids=ids).logits[0].numpy()
    # llama.cpp keeps keys and values in fp16: as apart as without adapters, up to a few times.
    bound = 5 * np.abs(answers(file, None) - without).max()
    assert bound < 5e-3
    assert np.abs(answers(file, folder) - expected).max() < bound
    assert np.abs(expected - without).max() > 50 * bound
