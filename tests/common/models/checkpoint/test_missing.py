"""Checkpoints that lack what the model needs: what is put right, and what is reported about the rest."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from common.errors import FinetuneError, UserError
from common.models.checkpoint.shards import SINGLE
from common.models.checkpoint.sources import CheckpointSource
from common.models.meta_model import build_meta_model
from common.models.presets import load_config
from tests.helpers.models.families import family_config, saved


def source_of(directory: Path) -> CheckpointSource:
    return CheckpointSource(directory, build_meta_model(load_config(directory)[0]))


def renamed(directory: Path, rename) -> dict[str, torch.Tensor]:
    tensors = load_file(directory / SINGLE)
    save_file({rename(name): value for name, value in tensors.items()}, directory / SINGLE, {"format": "pt"})
    return tensors


@pytest.mark.parametrize("rename", [
    lambda name: f"module.{name}", lambda name: f"_orig_mod.{name}", lambda name: f"_orig_mod.module.{name}",
    lambda name: name.replace(".mlp.", ".mlp._orig_mod.").replace("self_attn.", "_fsdp_wrapped_module.self_attn."),
])  # fmt: skip
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_names_of_wrappers_are_no_part_of_the_model(rename, family: str, tmp_path: Path) -> None:
    directory = saved(tmp_path, family_config(family))
    expected = AutoModelForCausalLM.from_pretrained(directory)
    renamed(directory, rename)
    source = source_of(directory)
    source.check()
    assert source.unused == []
    for name, value in source.read([name for name, _ in expected.named_parameters()]):
        assert torch.equal(value, expected.get_parameter(name)), name


def test_a_base_model_that_has_no_head(tmp_path: Path) -> None:
    AutoModel.from_config(family_config("llama", tie_word_embeddings=False)).save_pretrained(tmp_path)
    with pytest.raises(FinetuneError) as error:
        source_of(tmp_path).check()
    said = str(error.value)
    assert (
        "without its head: of what a LlamaForCausalLM has, it lacks lm_head.weight and nothing else" in said
    )
    assert '"tie_word_embeddings": true' in said and "is config.json" not in said.lower()
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"tie_word_embeddings": True}))
    source_of(tmp_path).check()


def test_a_classifier(tmp_path: Path) -> None:
    config = family_config("llama", tie_word_embeddings=False, num_labels=3)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    directory = tmp_path
    model = build_meta_model(family_config("llama", tie_word_embeddings=False))
    with pytest.raises(
        FinetuneError, match=r"without its head.* It has score\.weight, for which a LlamaForCausalLM"
    ):
        CheckpointSource(directory, model).check()


@pytest.mark.parametrize("part", ["bias", "lora_A.default.weight"])
def test_layers_that_have_more_than_the_configuration_says(part: str, tmp_path: Path) -> None:
    """With biases that config.json does not have, transformers makes another model, and warns."""
    directory, layer = saved(tmp_path, family_config("llama")), "model.layers.0.self_attn.q_proj"
    tensors = load_file(directory / SINGLE)
    others = {
        "model.layers.9.mlp.up_proj.weight": torch.ones(2),
        "model.layers.0.rotary_emb.inv_freq": torch.ones(2),
    }
    save_file(tensors | others, directory / SINGLE)
    source = source_of(directory)
    source.check()
    assert source.unplaced == ["model.layers.9.mlp.up_proj.weight"]
    save_file(tensors | {f"{layer}.{part}": torch.ones(2)}, directory / SINGLE)
    with pytest.raises(UserError, match=f"has {layer}.{part}, and config.json makes {layer} without it"):
        source_of(directory).check()


def test_few_bits_without_a_configuration(tmp_path: Path) -> None:
    directory, name = saved(tmp_path, family_config("llama")), "model.layers.0.mlp.up_proj"
    tensors = load_file(directory / SINGLE)
    tensors[f"{name}.qweight"] = torch.zeros(4, 4, dtype=torch.int32)
    del tensors[f"{name}.weight"]
    save_file(tensors, directory / SINGLE)
    with pytest.raises(FinetuneError, match=rf"lacks 1 of .*: {name}.weight. It has {name}.qweight instead"):
        source_of(directory).check()


def test_the_command_that_converts_pickled_weights_works(tmp_path: Path) -> None:
    directory = saved(tmp_path / "model", family_config("llama"))
    tensors = load_file(directory / SINGLE)
    torch.save(tensors, directory / "pytorch_model.bin")
    (directory / SINGLE).unlink()
    with pytest.raises(UserError) as error:
        source_of(directory)
    exec(str(error.value).partition('python -c "')[2].partition('"')[0])
    converted = source_of(Path(f"{directory}-safetensors"))
    converted.check()
    for name, value in converted.read(list(converted.shapes)):
        assert torch.equal(value, tensors[name]), name
