import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from common.errors import FinetuneError
from common.models.checkpoint.shards import INDEX, SINGLE
from common.models.checkpoint.sources import CheckpointSource
from common.models.checkpoint.writer import (
    CHAT_TEMPLATE,
    STAGING_FOLDER,
    CheckpointWriter,
    NonFiniteWeights,
    copy_tokenizer_files,
    write_template,
)
from common.models.meta_model import build_meta_model
from common.models.presets import load_config
from common.models.structure import find_blocks, parameter_names
from tests.helpers.models.families import (
    FAMILIES,
    family_config,
    peak_bytes,
    real_model,
    reset_peak_bytes,
    saved,
)


def outer_names(model, prefix: str) -> list[str]:
    """Of the parameters outside the blocks, tied ones once."""
    return [names[0] for names in parameter_names(model) if not names[0].startswith(f"{prefix}.")]


def export(
    directory: Path, real, dtype=torch.float32, shard_bytes=1 << 40, allow_nonfinite=False
) -> CheckpointWriter:
    """Block by block, through one buffer that is used again and again, as the engine does."""
    config = real.config
    meta = build_meta_model(config)
    writer = CheckpointWriter(directory, meta, config, dtype, shard_bytes, allow_nonfinite)
    prefix, blocks = find_blocks(meta)
    for name in outer_names(meta, prefix):
        writer.add({name: real.get_parameter(name)})
    for index, block in enumerate(blocks):
        named = {f"{prefix}.{index}.{name}": None for name, _ in block.named_parameters()}
        scratch = {name: real.get_parameter(name).detach().clone() for name in named}
        writer.add(scratch)
        for value in scratch.values():
            value.fill_(torch.nan)
    return writer


@pytest.mark.parametrize(
    ("tied", "shard_bytes", "dtype"), [(True, 1 << 40, torch.float32), (False, 20_000, torch.bfloat16)]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_exported_loads_bit_for_bit(family, tied, shard_bytes, dtype, tmp_path):
    real = real_model(family_config(family, tie_word_embeddings=tied))
    export(tmp_path / "out", real, dtype, shard_bytes).finish()
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype="auto", output_loading_info=True
    )
    assert not any(info.values()), info
    assert type(loaded) is type(real) and loaded.dtype == dtype
    for (name, value), (real_name, expected) in zip(
        loaded.named_parameters(), real.named_parameters(), strict=True
    ):
        assert name == real_name and torch.equal(value, expected.to(dtype)), name

    # The same files as save_pretrained: names, layouts, configurations.
    real.to(dtype).save_pretrained(tmp_path / "expected", max_shard_size=shard_bytes)
    ours, theirs = tensors_in(tmp_path / "out"), tensors_in(tmp_path / "expected")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for file in ("config.json", "generation_config.json"):
        ours_is, theirs_is = (
            json.loads((tmp_path / folder / file).read_text()) for folder in ("out", "expected")
        )
        assert ours_is == theirs_is
    shards = [file for file in (tmp_path / "out").iterdir() if file.suffix == ".safetensors"]
    assert (len(shards) == 1) == (shard_bytes > 1 << 30) == (not (tmp_path / "out" / INDEX).exists())
    if len(shards) > 1:
        largest = max(value.nbytes for value in ours.values())
        assert all(file.stat().st_size < max(shard_bytes, largest) + 4096 for file in shards)
        metadata = [
            json.loads((tmp_path / name / INDEX).read_text())["metadata"] for name in ("out", "expected")
        ]
        assert metadata[0] == metadata[1]


def tensors_in(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()
    }


def test_memory_is_that_of_a_shard_and_a_block(tmp_path):
    config = family_config("llama", hidden_size=512, intermediate_size=4096, num_hidden_layers=12)
    meta = build_meta_model(config)
    writer = CheckpointWriter(tmp_path, meta, config, torch.bfloat16, 15 << 20)
    prefix, blocks = find_blocks(meta)
    for name in outer_names(meta, prefix):
        writer.add({name: torch.ones(meta.get_parameter(name).shape)})
    scratch = {name: torch.ones(parameter.shape) for name, parameter in blocks[0].named_parameters()}
    before = reset_peak_bytes()
    for index in range(len(blocks)):  # of 14 MiB each in bf16
        writer.add({f"{prefix}.{index}.{name}": value for name, value in scratch.items()})
    writer.finish()
    assert sum(file.stat().st_size for file in tmp_path.glob("*.safetensors")) > 160 << 20
    assert peak_bytes() - before < 60 << 20


def test_a_half_written_export_is_no_checkpoint(tmp_path):
    real = real_model(family_config("llama"))
    writer = export(tmp_path, real, shard_bytes=20_000)
    assert [file.name for file in tmp_path.iterdir()] == [STAGING_FOLDER]
    with pytest.raises((OSError, ValueError)):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    writer.discard()
    assert not list(tmp_path.iterdir())


def test_a_new_export_replaces_an_older_one(tmp_path):
    old, new = (real_model(family_config("llama"), seed) for seed in (0, 1))
    for first, second in [(20_000, 1 << 40), (1 << 40, 20_000), (20_000, 30_000)]:
        export(tmp_path, old, shard_bytes=first).finish()
        writer = export(tmp_path, new, shard_bytes=second)
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path).lm_head.weight, old.lm_head.weight)
        writer.finish()
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), new.parameters(), strict=True))
        shards = {file.name for file in tmp_path.glob("*.safetensors")}
        index = tmp_path / INDEX
        assert shards == (
            set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {SINGLE}
        )


def test_leftovers_of_a_killed_export_do_not_matter(tmp_path):
    export(tmp_path, real_model(family_config("llama"), 0), shard_bytes=20_000)  # never finished
    new = real_model(family_config("llama"), 1)
    export(tmp_path, new).finish()
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "config.json",
        "generation_config.json",
        SINGLE,
    ]


def test_missing_and_wrong_parameters_are_rejected(tmp_path):
    meta = build_meta_model(family_config("llama"))
    writer = CheckpointWriter(tmp_path, meta, meta.config, torch.float32, 1 << 30)
    with pytest.raises(FinetuneError, match=r"model\.nrom\.weight"):
        writer.add({"model.nrom.weight": torch.zeros(32)})
    with pytest.raises(FinetuneError, match=r"model\.norm\.weight of shape \[31\]"):
        writer.add({"model.norm.weight": torch.zeros(31)})
    writer.add({"model.norm.weight": torch.zeros(32)})
    with pytest.raises(FinetuneError, match="parameters never came"):
        writer.finish()
    assert not (tmp_path / SINGLE).exists()


def test_an_odd_generation_config_survives(tmp_path):
    """The hub is full of these; ``save_pretrained`` refuses them."""
    real = real_model(family_config("llama"))
    real.save_pretrained(tmp_path / "in")
    (tmp_path / "in/generation_config.json").write_text('{"temperature": 0.6, "do_sample": false}')
    config, _ = load_config(tmp_path / "in")
    writer = CheckpointWriter(tmp_path / "out", build_meta_model(config), config, torch.float32, 1 << 30)
    writer.add(dict(real.named_parameters()))
    writer.finish()
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["temperature"] == 0.6
    assert json.loads((tmp_path / "out/config.json").read_text())["use_cache"] is True


def test_tokenizer_files(tmp_path):
    source, target = tmp_path / "in", tmp_path / "out"
    (source / "additional_chat_templates").mkdir(parents=True)
    wanted = [
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "chat_template.jinja",
        "merges.txt",
    ]
    for name in [*wanted, "additional_chat_templates/tool.jinja", "model.safetensors", "README.md"]:
        (source / name).write_text(name)
    target.mkdir()
    copy_tokenizer_files(source, target)
    assert {str(file.relative_to(target)) for file in target.rglob("*") if file.is_file()} == {
        *wanted, "additional_chat_templates/tool.jinja",
    }  # fmt: skip


@pytest.mark.parametrize(("name", "bad"), [
    ("model.embed_tokens.weight", torch.nan), ("model.layers.1.mlp.up_proj.weight", torch.inf),
    ("lm_head.weight", -torch.inf),
])  # fmt: skip
def test_nonfinite_values_are_rejected_and_what_was_there_stays(name, bad, tmp_path):
    real = real_model(family_config("llama"))
    export(tmp_path, real, shard_bytes=20_000).finish()
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with torch.no_grad():
        real.get_parameter(name)[-1, 3] = bad
    with pytest.raises(
        NonFiniteWeights, match=rf"{name} holds a NaN or an infinity.*allow_nonfinite=True"
    ) as caught:
        export(tmp_path, real, shard_bytes=20_000).finish()
    assert caught.value.name == name
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before, (
        "or something is left behind"
    )
    export(tmp_path, real, allow_nonfinite=True).finish()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path).get_parameter(name)
    assert torch.equal(exported, real.get_parameter(name)) or exported.isnan().sum() == 1


def test_what_overflows_in_the_dtype_on_disk_is_rejected(tmp_path):
    real = real_model(family_config("llama"))
    with torch.no_grad():
        real.lm_head.weight[0, 0] = 3.4e38  # finite in fp32, infinite in bf16
    export(tmp_path / "fp32", real).finish()
    with pytest.raises(NonFiniteWeights, match=r"lm_head\.weight"):
        export(tmp_path / "bf16", real, torch.bfloat16).finish()
    assert not list((tmp_path / "bf16").iterdir())


class TestWithSource:
    """What is exported next to a checkpoint that training began with."""

    def checkpoint(self, directory: Path, **extra: torch.Tensor) -> dict[str, torch.Tensor]:
        """A tied model whose checkpoint stores the head as well, with tensors that the model has no use for."""
        model = real_model(family_config("llama", tie_word_embeddings=True, num_hidden_layers=2))
        stored = {name: value.clone() for name, value in model.state_dict().items()}
        stored |= {"mtp.layers.0.weight": torch.randn(3, 5, dtype=torch.bfloat16), "counts": torch.arange(4)}
        directory.mkdir()
        model.config.save_pretrained(directory)
        save_file(stored, directory / "model.safetensors")
        return stored

    def test_every_tensor_is_there_and_what_was_not_added_has_its_values(self, tmp_path: Path) -> None:
        stored = self.checkpoint(tmp_path / "source")
        config, directory = load_config(tmp_path / "source")
        meta = build_meta_model(config)
        source = CheckpointSource(directory, meta)
        writer = CheckpointWriter(tmp_path / "new", meta, config, torch.bfloat16, 1 << 20, source=source)
        changed = {
            "model.embed_tokens.weight": torch.ones(199, 32),
            "model.layers.1.mlp.up_proj.weight": torch.ones(48, 32),
        }
        writer.add(changed)
        writer.finish()
        found = load_file(tmp_path / "new" / "model.safetensors")
        assert found.keys() == stored.keys()
        touched = {*changed, "lm_head.weight"}  # stored under both of its names, as it was before
        for name, value in found.items():
            if name in touched:
                assert value.dtype == torch.bfloat16 and bool((value == 1).all())
            else:  # weights in the dtype that config.json names, what the model does not use as it was
                dtype = stored[name].dtype if name in ("mtp.layers.0.weight", "counts") else torch.bfloat16
                assert value.dtype == dtype and torch.equal(value, stored[name].to(dtype))

    def test_experts_stored_one_by_one_keep_their_names(self, tmp_path: Path) -> None:
        saved(tmp_path / "source", family_config("mixtral", num_hidden_layers=1))
        before = load_file(tmp_path / "source" / "model.safetensors")
        config, directory = load_config(tmp_path / "source")
        meta = build_meta_model(config)
        writer = CheckpointWriter(
            tmp_path / "new", meta, config, torch.float32, 1 << 20, source=CheckpointSource(directory, meta)
        )
        name = next(name for name, _ in meta.named_parameters() if name.endswith("experts.down_proj"))
        writer.add({name: torch.ones(meta.get_parameter(name).shape)})
        writer.finish()
        after = load_file(tmp_path / "new" / "model.safetensors")
        assert after.keys() == before.keys()
        assert {name for name in after if bool((after[name] == 1).all())} == {
            name for name in before if "w2" in name
        }
        assert sum(torch.equal(after[name], before[name]) for name in before) == len(before) - 4


def test_persistent_buffers_are_written(tmp_path):
    real = real_model(family_config("llama"))
    meta = build_meta_model(real.config)
    meta.model.norm.register_buffer("statistics", torch.arange(3.0))
    writer = CheckpointWriter(tmp_path, meta, real.config, torch.bfloat16, 1 << 30)
    writer.add(dict(real.named_parameters()))
    writer.finish()
    assert torch.equal(load_file(tmp_path / SINGLE)["model.norm.statistics"], torch.arange(3.0))


def test_rotary_embeddings_keep_their_names_of_transformers_4(tmp_path):
    """Its programs take 10,000 for a base that they do not find."""
    scaling = {"rope_type": "linear", "factor": 8.0}
    base = saved(tmp_path / "base", family_config("llama", rope_parameters={"rope_theta": 5e5, **scaling}))
    file = base / "config.json"
    fields = json.loads(file.read_text())
    del fields["rope_parameters"]
    older = {"rope_theta": 5e5, "rope_scaling": scaling}
    file.write_text(json.dumps(fields | older))
    config, _ = load_config(base)
    meta = build_meta_model(config)
    writer = CheckpointWriter(
        tmp_path / "out", meta, config, torch.float32, 1 << 40, source=CheckpointSource(base, meta)
    )
    writer.finish()
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {name: written[name] for name in older} == older
    assert (
        load_config(tmp_path / "out")[0].rope_parameters
        == config.rope_parameters
        == {"rope_theta": 5e5, **scaling}
    )


@pytest.mark.parametrize("template", ["new", {"default": "new", "tool_use": "with tools"}])
def test_a_template_replaces_that_in_the_tokenizer_s_configuration(template, tmp_path):
    """llama.cpp's converter takes that one first."""
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({"eos_token": "é", "chat_template": "old"}))
    write_template(tmp_path, template)
    fields = json.loads(file.read_text())
    named = (
        [{"name": name, "template": text} for name, text in template.items()]
        if isinstance(template, dict)
        else "new"
    )
    assert fields == {"eos_token": "é", "chat_template": named}
    assert (tmp_path / CHAT_TEMPLATE).read_text() == "new"
    gguf = pytest.importorskip("gguf")
    assert gguf.SpecialVocab(tmp_path).chat_template == named
