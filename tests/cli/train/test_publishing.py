"""What is exported names the model that it comes from as others know it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from common.files import CACHE_VARIABLE
from tests.cli.conftest import Finetune
from tests.helpers.models.gguf_files import FAMILIES, FIELDS, write_gguf

COMMON = ("--batch-size", 2, "--seq-len", 32, "--steps", 2, "--gpu", "cpu", "--lr", "1e-3")


def test_adapters_of_a_checkpoint_in_a_hubs_cache_name_the_hubs_model(
    finetune: Finetune, checkpoint: Path, tmp_path: Path
) -> None:
    snapshot = tmp_path / "models--some--llama" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(checkpoint)
    out = tmp_path / "out"
    done = finetune("--model", snapshot, *COMMON, "--lora-rank", 2, "--output", out)
    assert done.status == 0, done.err
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == "some/llama"


@pytest.mark.slow
def test_adapters_of_a_gguf_file_name_the_file(
    finetune: Finetune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not its description in the cache, which another machine does not have; and llama.cpp can load them."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    file, out = write_gguf(tmp_path / "model.gguf", FAMILIES["llama"][0], FIELDS), tmp_path / "out"
    done = finetune("--model", file, *COMMON, "--lora-rank", 2, "--output", out)
    assert done.status == 0, done.err
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(file)
    assert "GGUF (Q8_0) in the checkpoint, frozen in its own bytes; they compute in" in done.out
    assert f"gguf     {out}/adapter.gguf, for llama.cpp" in done.out and (out / "adapter.gguf").is_file()
    assert f"finetune export --model {file} --adapter {out}" in done.out
    again = finetune(
        "export", "--model", file, "--adapter", out, "--output", tmp_path / "merged", "--dtype", "bf16"
    )
    assert again.status == 0, again.err
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert {value.dtype for value in merged.values()} == {torch.bfloat16}
    verified = finetune("verify", out)
    assert verified.status == 0, verified.out
