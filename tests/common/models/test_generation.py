"""The generation configuration is that of the model's directory, and of no other."""

from pathlib import Path

import pytest
from transformers import GenerationConfig, LlamaConfig

from common.models.generation import generation_config_of


def test_a_preset_does_not_take_the_working_directorys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    GenerationConfig(eos_token_id=[7, 8]).save_pretrained(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert generation_config_of(LlamaConfig(eos_token_id=2)).eos_token_id == 2
    assert generation_config_of(LlamaConfig(eos_token_id=2), tmp_path).eos_token_id == [7, 8]
