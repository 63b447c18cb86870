"""``--sample`` prints what transformers would generate, token by token."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import fuyou
from cli.train.sample import print_sample
from common.data.demo_text import train_demo_tokenizer


def test_prints_what_the_model_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=384,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    train_demo_tokenizer(384, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    (tmp_path / "ssd").mkdir()
    options = {"ssd": [tmp_path / "ssd"], "host_memory": "600MiB", "dtype": "fp32", "prove": False}
    asked = {"temperature": 0.0, "longest": 40, "seed": 0}
    with fuyou.Engine(tmp_path / "model", batch_shape=(1, 40), generation=(1, 40, 12), **options) as engine:
        print_sample(engine, tokenizer, "Two and two", tokens=12, **asked)
        shown = capsys.readouterr().out
        print_sample(engine, tokenizer, "word " * 60, tokens=12, **asked)
        assert "(nothing: the prompt is 40 tokens long, and --seq-len is 40)" in capsys.readouterr().out
    ids = tokenizer("Two and two", return_tensors="pt")["input_ids"]
    real = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    made = real.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=2)
    said = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True).removesuffix("\ufffd")
    assert shown.startswith(f"sample   Two and two{said}\n") and said
    assert f"({made.shape[1] - ids.shape[1]} tokens in " in shown
