import copy
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import Chunk, WeightConverter

from common.errors import FinetuneError, UserError
from common.models.checkpoint.random_source import RandomSource
from common.models.checkpoint.shards import INDEX, SINGLE
from common.models.checkpoint.sources import CheckpointSource
from common.models.meta_model import build_meta_model
from common.models.presets import load_config
from tests.helpers.models.families import (
    FAMILIES,
    MIXED,
    family_config,
    peak_bytes,
    real_model,
    reset_peak_bytes,
    saved,
)
from tests.helpers.models.rows import rows_are_alike


def source_of(directory: Path) -> CheckpointSource:
    config, _ = load_config(directory)
    return CheckpointSource(directory, build_meta_model(config))


def assert_gives(source: CheckpointSource, expected: AutoModelForCausalLM, by_rows: bool = True) -> None:
    source.check()
    names = [name for name, _ in expected.named_parameters()]
    assert names == [name for name, _ in source.model.named_parameters()]
    given = list(source.read(names))
    assert [name for name, _ in given] == names
    for (name, value), parameter in zip(given, expected.parameters(), strict=True):
        assert value.dtype == parameter.dtype and torch.equal(value, parameter), name
        assert rows_are_alike(source, name, value) or not by_rows, name


@pytest.mark.parametrize(
    ("tied", "shard", "dtype"), [(True, "50GB", torch.float32), (False, "20KB", torch.bfloat16)]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_gives_what_from_pretrained_gives(family, tied, shard, dtype, tmp_path):
    saved(tmp_path, family_config(family, tie_word_embeddings=tied), shard, dtype)
    assert len(list(tmp_path.glob("*.safetensors"))) > (1 if shard != "50GB" else 0)
    source = source_of(tmp_path)
    assert_gives(source, AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto"))
    assert source.unused == []


@pytest.mark.parametrize("family", FAMILIES)
def test_names_without_and_with_the_base_models_prefix(family, tmp_path):
    """GPT-2 on the hub has ``h.0...``; others have ``model.`` where the class has none."""
    directory = saved(tmp_path, family_config(family, tie_word_embeddings=True))
    expected = AutoModelForCausalLM.from_pretrained(directory)
    prefix = f"{expected.base_model_prefix}."
    tensors = {name.removeprefix(prefix): value for name, value in load_file(directory / SINGLE).items()}
    save_file(tensors, directory / SINGLE, metadata={"format": "pt"})
    assert_gives(source_of(directory), expected)


def test_both_of_a_tied_pair_are_stored(tmp_path):
    directory = saved(tmp_path, family_config("llama", tie_word_embeddings=True))
    expected = AutoModelForCausalLM.from_pretrained(directory)
    tensors = load_file(directory / SINGLE)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, directory / SINGLE, metadata={"format": "pt"})
    assert_gives(source_of(directory), expected)
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, directory / SINGLE, metadata={"format": "pt"})
    with pytest.raises(UserError, match="tie_word_embeddings"):
        source_of(directory).check()


@pytest.mark.parametrize("family", MIXED)
def test_fused_experts_on_disk(family, tmp_path):
    """A checkpoint saved in the model's own layout instead of the hub's."""
    model = real_model(family_config(family))
    model.save_pretrained(tmp_path, save_original_format=False)
    assert any("gate_up_proj" in name for name in load_file(tmp_path / SINGLE))
    assert_gives(source_of(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path))


def test_memory_is_that_of_one_parameter(tmp_path):
    config = family_config("llama", hidden_size=512, intermediate_size=4096, num_hidden_layers=12)
    source = source_of(saved(tmp_path, config, "30MB"))  # 12 x 3 matrices of 8 MiB
    names = list(source.shapes)
    total = sum(value.nbytes for _, value in source.read(names[:10]))  # warm
    before, total = reset_peak_bytes(), 0
    for _, value in source.read(names):
        total += int(value.count_nonzero()) * 4  # touches every page
        del value
    assert total > 300 << 20 and peak_bytes() - before < 40 << 20


@pytest.mark.parametrize("stored", [True, False])
def test_memory_of_rows_is_that_of_some_experts(stored, tmp_path):
    """Read range by range, alternately, as pieces are; the experts of a block are 96 MiB."""
    sizes = {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 32, "num_hidden_layers": 1}
    config = family_config("qwen3_moe", **sizes)
    model = build_meta_model(config)
    source = source_of(saved(tmp_path, config, "30MB")) if stored else RandomSource(model, 3)
    names = [name for name, parameter in model.named_parameters() if parameter.dim() == 3]
    assert len(names) == 2 and all(source.reads_rows(name) for name in names)
    source.read_rows(names[1], 31, 32)  # warm
    before, total = reset_peak_bytes(), 0
    for first in range(0, 32, 4):
        total += sum(int(source.read_rows(name, first, first + 4).count_nonzero()) * 4 for name in names)
    assert total > 95 << 20 and peak_bytes() - before < 32 << 20


# Damage. -----------------------------------------------------------------------------------------------------------


def shards_of(directory: Path) -> list[Path]:
    return sorted(directory.glob("model-*.safetensors"))


def rewrite(file: Path, change) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture
def sharded(tmp_path):
    return saved(tmp_path, family_config("mixtral"), "20KB")


def test_damaged_shards_are_found_and_named(sharded):
    shard = shards_of(sharded)[1]
    whole = shard.read_bytes()
    header = int.from_bytes(whole[:8], "little")
    name = re.search(rb'"([^"]+)":\{"dtype', whole)[1].decode()
    for damaged, words in [
        (whole[:-1], "truncated"),
        (whole[: 8 + header + 5], "truncated"),
        (whole[: 8 + header - 5], "damaged"),
        (whole[:5], "damaged"),
        (b"", "damaged"),
        (whole + b"0", "damaged"),
        (b"\xff" * 8 + whole[8:], "damaged"),
        (whole[:8] + b"x" * header + whole[8 + header :], "damaged"),
        (whole[:8] + b"[]".ljust(header) + whole[8 + header :], "damaged"),
        (whole.replace(b"[199,32]", b"[199,31]").replace(b"[48,32]", b"[48,31]"), "damaged"),
    ]:
        shard.write_bytes(damaged)
        with pytest.raises(FinetuneError, match=words) as error:
            source_of(sharded).check()
        assert str(shard) in str(error.value) and error.value.exit_status == 1
        if words == "truncated":
            assert re.search(r"its tensor \S+ is", str(error.value))
    shard.write_bytes(whole)
    source_of(sharded).check()
    assert name in source_of(sharded).shards.tensors


def test_an_index_that_promises_too_much(sharded):
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.more"] = shards_of(sharded)[0].name
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(FinetuneError, match=r"00001-of.* lacks the tensor model\.more"):
        source_of(sharded)


def test_missing_and_misshapen_parameters(tmp_path):
    directory = saved(tmp_path, family_config("llama"))
    rewrite(directory / SINGLE, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(FinetuneError, match=r"lacks 1 of .*model\.layers\.1\.mlp\.up_proj\.weight"):
        source_of(directory).check()
    rewrite(
        directory / SINGLE, lambda t: t.update({"model.layers.1.mlp.up_proj.weight": torch.zeros(48, 31)})
    )
    with pytest.raises(
        FinetuneError, match=r"model\.safetensors in .*up_proj\.weight of shape \[48, 31\].*\[48, 32\]"
    ):
        source_of(directory).check()


@pytest.mark.parametrize("change", [
    lambda tensors: tensors.pop("model.layers.1.block_sparse_moe.experts.2.w1.weight"),
    lambda tensors: tensors.update({"model.layers.1.block_sparse_moe.experts.2.w1.weight": torch.zeros(48, 31)}),
])  # fmt: skip
def test_a_missing_or_misshapen_expert(change, tmp_path):
    directory = saved(tmp_path, family_config("mixtral"))
    rewrite(directory / SINGLE, change)
    with pytest.raises(
        FinetuneError, match=r"model\.safetensors.*experts\.0\.w1.*model\.layers\.1\.mlp\.experts"
    ):
        source_of(directory).check()


def test_bin_files_only(tmp_path):
    directory = saved(tmp_path, family_config("llama"))
    (directory / SINGLE).rename(directory / "pytorch_model.bin")
    with pytest.raises(UserError, match="save_pretrained"):
        source_of(directory)
    (directory / "pytorch_model.bin").unlink()
    with pytest.raises(UserError, match="no weights"):
        source_of(directory)


def test_a_shard_that_is_damaged_after_the_check(tmp_path):
    source = source_of(saved(tmp_path, family_config("llama")))
    source.check()
    (tmp_path / SINGLE).write_bytes((tmp_path / SINGLE).read_bytes()[:2000])
    with pytest.raises(
        FinetuneError, match=r"model\.safetensors is truncated: it ends within model\.norm\.weight"
    ):
        list(source.read(["model.norm.weight"]))


# Random weights. ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_are_distributed_as_the_family_has_it(family, tied):
    config = family_config(family, tie_word_embeddings=tied)
    meta, real = build_meta_model(config), AutoModelForCausalLM.from_config(config)
    source = RandomSource(meta, seed=1)
    source.check()
    state = torch.get_rng_state()
    given = dict(source.read([name for name, _ in meta.named_parameters()]))
    assert torch.equal(torch.get_rng_state(), state) and all(p.is_meta for p in meta.parameters())
    for name, expected in real.state_dict().items():
        value = given.get(name)
        if value is None:  # a buffer, or another name of a tied parameter
            continue
        padded = "embed_tokens" in name and config.pad_token_id is not None  # one row is set alone
        assert rows_are_alike(source, name, value) == (value.dim() > 1 and not padded), name
        assert value.dtype == torch.float32 and value.shape == expected.shape
        if expected.unique().numel() == 1:  # norms and biases
            assert torch.equal(value, expected), name
        else:
            margin = 5 * float(expected.std()) / value.numel() ** 0.5
            assert abs(value.std() - expected.std()) < 2 * margin and abs(value.mean()) < margin, name
            assert not torch.equal(value, expected)
            zeros = (expected == 0).all(-1)  # a padding token's row
            assert torch.equal((value == 0).all(-1), zeros)
    randoms = [v for v in given.values() if v.numel() > 500]
    assert not any(
        torch.equal(a, b) for i, a in enumerate(randoms) for b in randoms[:i] if a.shape == b.shape
    )


def test_random_weights_depend_on_seed_and_name_only():
    config = family_config("gpt2")
    model = build_meta_model(config)
    names = [name for name, _ in model.named_parameters()]
    first = dict(RandomSource(model, seed=1).read(names))
    again = dict(RandomSource(build_meta_model(config), seed=1).read(names[::-1]))
    other = dict(RandomSource(model, seed=2).read(names))
    assert all(torch.equal(first[name], again[name]) for name in names)
    assert not torch.equal(first["transformer.wte.weight"], other["transformer.wte.weight"])
    assert torch.equal(
        dict(RandomSource(model, 1).read(["lm_head.weight"]))["lm_head.weight"], first[names[0]]
    )


def test_random_rows_do_not_depend_on_the_range_that_is_read(monkeypatch):
    """Groups of 7 rows, which are read whole, in part, and with the last one shorter than the others."""
    source = RandomSource(build_meta_model(family_config("gpt2")), seed=3)
    name = "transformer.h.1.mlp.c_proj.weight"  # scaled by the block around it
    width = source.model.get_parameter(name).shape[1]
    monkeypatch.setattr("common.models.checkpoint.random_source.GROUP_ELEMENTS", 7 * width)
    whole = dict(source.read([name]))[name]
    assert not torch.equal(whole[:7], whole[7:14])
    assert whole.std() == pytest.approx(0.02 / (2 * source.model.config.n_layer) ** 0.5, rel=0.1)
    rows = whole.shape[0]
    for first, stop in ((0, 7), (3, 5), (6, 15), (7, rows), (rows - 1, rows)):
        assert torch.equal(source.read_rows(name, first, stop), whole[first:stop])


def test_one_tensor_on_disk_that_is_several_in_the_model(tmp_path, monkeypatch):
    """As some families store query, key and value; here with a rule made up for Llama."""
    targets = [f"self_attn.{part}_proj.weight" for part in "qkv"]
    rules = [WeightConverter("self_attn.qkv.weight", list(targets), operations=[Chunk(dim=0)])]
    monkeypatch.setattr(
        "common.models.checkpoint.shards.get_model_conversion_mapping", lambda model: copy.deepcopy(rules)
    )
    directory = saved(tmp_path, family_config("llama", num_key_value_heads=4))
    expected = AutoModelForCausalLM.from_pretrained(directory)
    tensors = load_file(directory / SINGLE)
    for layer in range(3):
        parts = [tensors.pop(f"model.layers.{layer}.{target}") for target in targets]
        tensors[f"model.layers.{layer}.self_attn.qkv.weight"] = torch.cat(parts)
    save_file(tensors, directory / SINGLE, metadata={"format": "pt"})
    source = source_of(directory)
    assert_gives(source, expected, by_rows=False)
    shuffled = list(source.shapes)[::-2] + list(source.shapes)[::2]
    assert all(torch.equal(value, expected.get_parameter(name)) for name, value in source.read(shuffled))


def test_persistent_buffers(tmp_path):
    directory = saved(tmp_path, family_config("llama"))
    model = build_meta_model(load_config(directory)[0])
    model.model.norm.register_buffer("statistics", torch.zeros(3))
    tensors = load_file(directory / SINGLE) | {"model.norm.statistics": torch.arange(3.0)}
    save_file(tensors, directory / SINGLE, metadata={"format": "pt"})
    source = CheckpointSource(directory, model)
    ((name, value),) = source.read_buffers()
    assert name == "model.norm.statistics" and torch.equal(value, torch.arange(3.0)) and source.unused == []


def test_a_missing_shard(sharded):
    shards_of(sharded)[1].unlink()
    with pytest.raises(FinetuneError, match=r"00002-of.*missing"):
        source_of(sharded)


def test_a_damaged_index(sharded):
    (sharded / INDEX).write_text("{")
    with pytest.raises(FinetuneError, match=r"index\.json is damaged"):
        source_of(sharded)
