import json

import pytest
from transformers import LlamaConfig

from common.errors import UserError
from common.models.meta_model import build_meta_model
from common.models.presets import load_config, preset_names
from tests.helpers.models.families import family_config

# Where the name is not the size: counts by the tables that the presets come from.
PUBLISHED = {"llama-7b": 6.7e9, "llama-30b": 32.5e9, "gpt-10b": 11.3e9, "gpt-15b": 16.2e9, "gpt-20b": 21.6e9}

EXPECTED = [
    *(f"gpt3-{size}" for size in ["1.3b", "2.7b", "13b", "33b", "65b", "135b", "175b", "276b", "412b", "805b"]),
    *(f"gpt-{size}" for size in ["10b", "15b", "20b", "25b", "30b"]),
    *(f"llama-{size}" for size in ["10m", "7b", "13b", "30b", "65b"]),
    *("gpt-neox-10b", "gpt-neox-20b", "gpt2-125m", "gpt2-350m"),
]


def test_all_presets_are_there():
    assert preset_names() == sorted(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_preset_has_the_size_in_its_name(name):
    config, directory = load_config(name)
    model = build_meta_model(config)
    number, unit = name.rpartition("-")[2][:-1], name[-1]
    expected = PUBLISHED.get(name, float(number) * {"m": 1e6, "b": 1e9}[unit])
    assert directory is None
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(expected, rel=0.03)
    assert all(p.is_meta for p in model.parameters())
    dropouts = {k: v for k, v in config.to_dict().items() if k.endswith(("_pdrop", "_dropout")) and "summary" not in k}
    dropouts.pop("classifier_dropout", None)
    assert dropouts and not any(dropouts.values()), dropouts


def test_a_configuration_is_returned_as_it_is():
    config = family_config("llama")
    assert load_config(config) == (config, None)


def test_a_directory_wins_over_a_preset_and_says_where_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama-7b").mkdir()
    assert load_config("llama-7b")[0].num_hidden_layers == 32  # an empty directory of that name is not in the way
    family_config("llama").save_pretrained("llama-7b")
    config, directory = load_config("llama-7b")
    assert isinstance(config, LlamaConfig) and config.num_hidden_layers == 3
    assert directory.samefile(tmp_path / "llama-7b")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt3-175", ["gpt3-175b"]),
        ("zzz", ["neither", "gpt3-175b", "llama-7b"]),
        ("./lama", ["'llama'", "in "]),
        ("nowhere/model", ["no directory nowhere", "nothing is downloaded"]),
        ("file.txt", ["is a file"]),
        ("empty", ["no config.json"]),
        ("outer", ["no config.json", "outer/inner"]),
        ("adapter", ["PEFT adapter"]),
        ("damaged", ["damaged/config.json"]),
        ("unknown", ["unknown/config.json", "no_such_type"]),
        ("t5", ["'t5'", "causal"]),
        ("quantized", ["quantized", "gptq"]),
    ],
)
def test_what_is_no_model_is_refused(name, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("llama", "empty", "outer/inner", "adapter", "damaged", "unknown", "t5", "quantized"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "file.txt").touch()
    (tmp_path / "adapter/adapter_config.json").touch()
    (tmp_path / "outer/inner/config.json").write_text("{}")
    (tmp_path / "damaged/config.json").write_text("{")
    (tmp_path / "unknown/config.json").write_text(json.dumps({"model_type": "no_such_type"}))
    (tmp_path / "t5/config.json").write_text(json.dumps({"model_type": "t5"}))
    quantized = {**family_config("llama").to_dict(), "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "quantized/config.json").write_text(json.dumps(quantized))
    with pytest.raises(UserError) as error:
        load_config(name)
    assert all(word in str(error.value) for word in words), str(error.value)
