"""GGUF files give the weights that transformers reads from them, bit for bit."""

import copy
import itertools
import os
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from common.errors import FinetuneError, UserError
from common.files import CACHE_VARIABLE
from common.models.checkpoint import gguf
from common.models.checkpoint.gguf import described
from common.models.checkpoint.gguf_table import TABLE
from common.models.checkpoint.random_source import classifier_config, write_with_new_head
from common.models.checkpoint.sources import CheckpointSource
from common.models.meta_model import build_meta_model
from common.models.presets import load_config
from tests.helpers.models.gguf_files import FAMILIES, FIELDS, LLAMA, write_gguf

pytest.importorskip("gguf")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_that_transformers_reads(family: str, tmp_path: Path) -> None:
    config, fields = FAMILIES[family]
    file = write_gguf(tmp_path / "model.gguf", config, FIELDS | fields)
    read, directory = load_config(file)
    assert directory is not None
    source = CheckpointSource(directory, build_meta_model(read))
    source.check()
    expected = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.float32
    ).state_dict()
    for name, value in source.read(list(source.shapes)):
        assert torch.equal(value, expected[name]), name
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.chat_template and tokenizer.eos_token_id == 2

    written = (directory / TABLE).stat().st_mtime_ns
    assert load_config(tmp_path / "model.gguf")[1] == directory == load_config(directory)[1]
    assert (directory / TABLE).stat().st_mtime_ns == written


def test_a_damaged_or_unfinished_description_is_made_again(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", FAMILIES["llama"][0], FIELDS)
    directory = described(file)
    names = sorted(path.name for path in directory.iterdir())
    assert (directory / "tokenizer.json").stat().st_size
    for name in ("tokenizer.json", TABLE, "config.json", gguf.SOURCE):
        whole = (directory / name).read_bytes()
        (directory / name).write_bytes(b"")  # as after a power cut
        (directory / "model.safetensors").write_bytes(b"")  # an earlier version's
        assert described(file) == directory
        assert (directory / name).read_bytes() == whole
        assert sorted(path.name for path in directory.iterdir()) == names


def test_a_file_that_is_replaced_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(tmp_path / "model.gguf", FAMILIES["llama"][0], FIELDS)
    other = write_gguf(tmp_path / "other.gguf", FAMILIES["llama"][0], FIELDS)
    write = gguf._write

    def replaced(parts: list[Path], directory: Path) -> None:
        write(parts, directory)
        other.replace(parts[0])

    with monkeypatch.context() as patch:
        patch.setattr(gguf, "_write", replaced)
        with pytest.raises(UserError, match=r"model.gguf was changed or replaced while it was read"):
            described(file)
    assert (described(file) / "config.json").is_file()


def test_a_file_that_is_split_is_read_as_one(tmp_path: Path) -> None:
    """The head is not in the part with the metadata."""
    config = FAMILIES["llama"][0]
    whole = write_gguf(tmp_path / "whole.gguf", config, FIELDS)
    first = write_gguf(tmp_path / "parts" / "model.gguf", config, FIELDS, split=6)
    assert len(list(first.parent.glob("*.gguf"))) == 4
    values = []
    for path in (whole, first, first.parent):
        read, directory = load_config(path)
        assert directory is not None and not read.tie_word_embeddings
        source = CheckpointSource(directory, build_meta_model(read))
        source.check()
        values.append(dict(source.read(list(source.shapes))))
    assert all(torch.equal(value, other[name]) for name, value in values[0].items() for other in values[1:])
    (first.parent / "model-00003-of-00004.gguf").unlink()
    with pytest.raises(UserError, match=r"model-00003-of-00004\.gguf is missing"):
        load_config(first)


@pytest.mark.parametrize("kind", ["IQ4_NL", "MXFP4"])
def test_types_that_are_not_kept_are_read(kind: str, tmp_path: Path) -> None:
    read, directory = load_config(
        write_gguf(tmp_path / "model.gguf", FAMILIES["llama"][0], FIELDS, kinds=(kind,))
    )
    assert directory is not None
    source = CheckpointSource(directory, build_meta_model(read))
    expected = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    ).state_dict()
    for name, value in source.read(list(source.shapes)):
        assert torch.equal(value, expected[name]), name
        if value.dim() == 2:
            assert source.reads_rows(name) and torch.equal(source.read_rows(name, 1, 19), value[1:19]), name
            assert source.compressed(name) is None


def test_a_file_that_is_cut_or_damaged(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", FAMILIES["llama"][0], FIELDS)
    directory = described(file)
    source = CheckpointSource(directory, build_meta_model(load_config(file)[0]))
    os.truncate(file, file.stat().st_size - 1000)
    with pytest.raises(FinetuneError, match=r"model\.gguf is truncated: it ends within"):
        list(source.read(list(source.shapes)))
    with pytest.raises(UserError, match=r"model\.gguf"):
        described(file)
    (directory / TABLE).write_text("{")
    with pytest.raises(FinetuneError, match=rf"{TABLE} is damaged"):
        CheckpointSource(directory, source.model)


def test_a_new_head_next_to_the_weights_of_a_file(tmp_path: Path) -> None:
    read, directory = load_config(write_gguf(tmp_path / "model.gguf", FAMILIES["llama"][0], FIELDS))
    assert directory is not None
    (tmp_path / "classifier").mkdir()
    write_with_new_head(
        directory, classifier_config(read, ["a", "b", "c"], None), tmp_path / "classifier", seed=0
    )
    config, folder = load_config(tmp_path / "classifier")
    assert folder is not None
    source = CheckpointSource(folder, build_meta_model(config))
    source.check()
    assert dict(source.read(["score.weight"]))["score.weight"].shape == (3, 32)
    name = "model.layers.0.mlp.up_proj.weight"
    before = CheckpointSource(directory, build_meta_model(read)).read([name])
    assert torch.equal(dict(source.read([name]))[name], dict(before)[name])


def test_what_cannot_be_read_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "broken.gguf").write_bytes(b"GGUF, but not really")
    with pytest.raises(UserError, match=r"transformers cannot read .*broken\.gguf: "):
        load_config(tmp_path / "other")
    folder = tmp_path / "two"
    folder.mkdir()
    file = write_gguf(folder / "a.gguf", FAMILIES["llama"][0], FIELDS, drop="ffn_up")
    with pytest.raises(
        UserError, match=r"cannot read .*a\.gguf: it lacks model\.layers\.0\.mlp\.up_proj\.weight"
    ):
        load_config(file)
    (folder / "b.gguf").write_bytes(b"")
    with pytest.raises(UserError, match=r"has 2 GGUF files: give one of them"):
        load_config(folder)
    with pytest.raises(UserError, match="GGUF model with architecture rwkv7 is not supported"):
        load_config(write_gguf(tmp_path / "rwkv.gguf", FAMILIES["llama"][0], FIELDS, architecture="rwkv7"))


def check_loss(written: PreTrainedConfig, directory: Path | None) -> None:
    """The loss is that of the model that was written, with the weights that were read; unscaled it is another."""
    assert directory is not None
    loaded = AutoModelForCausalLM.from_config(load_config(directory)[0])
    loaded.load_state_dict(dict(CheckpointSource(directory, loaded).read(list(loaded.state_dict()))))
    ids = torch.arange(60)[None] % 30

    def loss(config: PreTrainedConfig) -> float:
        model = AutoModelForCausalLM.from_config(config)
        model.load_state_dict(loaded.state_dict())
        with torch.no_grad():
            return float(model(input_ids=ids, labels=ids).loss)

    with torch.no_grad():
        read = float(loaded(input_ids=ids, labels=ids).loss)
    assert read == loss(written)
    unscaled = copy.deepcopy(written)
    unscaled.rope_parameters = type(written)(rope_theta=1e4).rope_parameters
    assert read != loss(unscaled)


SCALED: dict[str, tuple[dict[str, Any], dict[str, int | float | str]]] = {
    "linear": ({"rope_type": "linear", "factor": 4.0}, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 16.0},
        {
            "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16,
            "rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.finetuned": 1,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", SCALED)
def test_scaled_rotary_embeddings_are_those_of_the_file(kind: str, tmp_path: Path) -> None:
    scaling, fields = SCALED[kind]
    written = LlamaConfig(**LLAMA, rope_parameters={"rope_theta": 1e4, **scaling})
    read, directory = load_config(write_gguf(tmp_path / "model.gguf", written, FIELDS | fields))
    assert read.rope_parameters == written.rope_parameters
    check_loss(written, directory)


def test_llama_3_keeps_its_scaled_frequencies(tmp_path: Path) -> None:
    """llama.cpp stores what each frequency is divided by, in a tensor."""
    scaling = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192}
    written = LlamaConfig(
        **LLAMA | {"hidden_size": 128}, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling}
    )
    plain = 5e5 ** (-torch.arange(0, 64, 2) / 64)
    factors = (plain / ROPE_INIT_FUNCTIONS["llama3"](written, "cpu")[0]).numpy()
    assert factors[0] == 1 and factors[-1] == pytest.approx(32) and len(set(factors.round(2))) > 3
    fields = FIELDS | {"embedding_length": 128, "rope.freq_base": 5e5}
    read, directory = load_config(write_gguf(tmp_path / "model.gguf", written, fields, rope_factors=factors))
    assert read.rope_parameters == written.rope_parameters
    check_loss(written, directory)
    with pytest.raises(UserError, match=r"rope_freqs.weight scales rotary embeddings in another way than"):
        load_config(write_gguf(tmp_path / "other.gguf", written, fields, rope_factors=factors[::-1]))


def test_gemma_3_scales_layers_without_a_window(tmp_path: Path) -> None:
    scaled = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    local = {"rope_type": "default", "rope_theta": 2e4}
    written = Gemma3TextConfig(
        **LLAMA | {"num_hidden_layers": 6}, head_dim=16, sliding_window=8,  # the sixth has no window
        rope_parameters={"full_attention": scaled, "sliding_attention": local},
    )  # fmt: skip
    fields = FIELDS | {
        "block_count": 6, "attention.key_length": 16, "attention.value_length": 16, "attention.sliding_window": 8,
        "rope.freq_base": 1e6, "rope.freq_base_swa": 2e4, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0,
    }  # fmt: skip
    read, directory = load_config(write_gguf(tmp_path / "model.gguf", written, fields))
    assert read.rope_parameters == {"full_attention": scaled, "sliding_attention": local}
    assert read.sliding_window == 8
    check_loss(written, directory)


def header(keys: bytes, key_count: int = 1, tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, key_count) + keys


def key(kind: int, value: bytes, name: bytes = b"llama.block_count") -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


HOSTILE = {
    "keys": (header(b"", 1 << 60), "1,152,921,504,606,846,976 keys"),
    "tensors": (header(b"", 0, 1 << 60), "1,152,921,504,606,846,976 tensors"),
    "name": (header(struct.pack("<Q", 1 << 40)), "1,099,511,627,776 bytes of a key"),
    "text": (header(key(8, struct.pack("<Q", 1 << 40))), "1,099,511,627,776 bytes of llama.block_count"),
    "array": (header(key(9, struct.pack("<IQ", 0, 1 << 30))), "1,073,741,824 elements of llama.block_count"),
    "arrays": (
        header(key(9, struct.pack("<IQ", 0, 3_000_000) + bytes(3_000_000)) * 2, 2),
        "3,000,000 elements of llama.block_count, and at most 1,000,000",
    ),
    "depth": (header(key(9, struct.pack("<IQ", 9, 1) * 9)), "arrays of arrays"),
    "layers": (header(key(4, struct.pack("<I", 10**9))), "llama.block_count = 1,000,000,000, and no model"),
    "dimensions": (header(struct.pack("<QI", 0, 1 << 31), 0, 1), "2,147,483,648 dimensions"),
    "end": (header(key(9, struct.pack("<IQ", 8, 9))), "it ends within its header"),
    "kind": (header(key(99, b"")), "unknown type 99"),
    "version": (b"GGUF" + struct.pack("<I", 77), "version 77"),
    "order": (b"GGUF" + struct.pack(">I", 3), "big-endian"),
}


@pytest.mark.parametrize("fault", HOSTILE)
def test_a_header_that_would_fill_the_memory_is_refused_before_it_is_read(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, message = HOSTILE[fault]
    (tmp_path / "hostile.gguf").write_bytes(content)
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("transformers reads it"))
    with pytest.raises(UserError, match=f"hostile.gguf.*{re.escape(message)}"):
        load_config(tmp_path / "hostile.gguf")


@pytest.mark.parametrize(("fields", "message"), [
    ({"attn_logit_softcapping": 30.0}, "llama.attn_logit_softcapping = 30.0, which LlamaConfig cannot express"),
    ({"a_key_of_tomorrow": 7}, "llama.a_key_of_tomorrow = 7, which LlamaConfig cannot express"),
    ({"attention.sliding_window": 16}, "a sliding window of 16, which LlamaConfig cannot express"),
    ({"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0}, "scaled by longrope, which is not read"),
    ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "without the original context length"),
    ({"rope.scaling.yarn_log_multiplier": 0.1, "rope.scaling.factor": 4.0}, "scaled with {'yarn_log_multiplier'"),
    ({"expert_count": 4}, "llama.expert_count = 4, which LlamaConfig cannot express"),
])  # fmt: skip
def test_metadata_that_cannot_be_applied_are_rejected(
    fields: dict[str, int | float | str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        load_config(write_gguf(tmp_path / "model.gguf", FAMILIES["llama"][0], FIELDS | fields))


def test_metadata_without_an_effect_are_no_obstacle(tmp_path: Path) -> None:
    nothing: dict[str, int | float | str] = {
        "attention.sliding_window": 64, "rope.scaling.type": "none", "attn_logit_softcapping": 0.0, "expert_count": 0,
        "rope.dimension_count": 16, "attention.key_length": 16, "attention.value_length": 16,
    }  # fmt: skip
    load_config(write_gguf(tmp_path / "model.gguf", FAMILIES["llama"][0], FIELDS | nothing))


def test_descriptions_that_were_exchanged_are_made_again(tmp_path: Path) -> None:
    config = FAMILIES["llama"][0]
    files = [write_gguf(tmp_path / f"{name}.gguf", config, FIELDS | {"rope.freq_base": base})
             for name, base in (("a", 1e4), ("b", 2e4))]  # fmt: skip
    first, second = (load_config(file)[1] for file in files)
    assert first is not None and second is not None
    first.rename(tmp_path / "kept")
    second.rename(first)
    (tmp_path / "kept").rename(second)
    assert [load_config(file)[0].rope_parameters["rope_theta"] for file in files] == [1e4, 2e4]


def _tokenizer(
    folder: Path, fields: dict[str, str | bool], merges: int | None = None
) -> PreTrainedTokenizerBase:
    """Return the tokenizer that a result has, of a GGUF file with these metadata of its tokenizer."""
    file = write_gguf(
        folder / "model.gguf", FAMILIES["llama"][0], FIELDS, tokenizer_fields=fields, merges=merges
    )
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(described(file))
    return tokenizer


@pytest.mark.parametrize(("fields", "message"), [
    ({"pre": "stablelm2"}, "its tokenizer.ggml.pre is 'stablelm2', and how its tokenizer splits texts is not known"),
    ({"pre": "default"}, "its tokenizer.ggml.pre is 'default', and how"),  # llama.cpp's, which is not GPT-2's
    ({"pre": ""}, "it has no tokenizer.ggml.pre, and how its tokenizer splits texts is not known"),
    ({"add_sep_token": True}, "it has tokenizer.ggml.add_sep_token, which is not read"),
    ({"remove_extra_whitespaces": True}, "it has tokenizer.ggml.remove_extra_whitespaces, which is not read"),
])  # fmt: skip
def test_tokenizers_that_are_not_known_are_refused(
    fields: dict[str, str | bool], message: str, tmp_path: Path
) -> None:
    instead = "train on the checkpoint that the file was made of"
    with pytest.raises(UserError, match=f"{re.escape(message)}.*: {instead}"):
        _tokenizer(tmp_path, fields)


@pytest.mark.parametrize(("pre", "pieces"), [
    ("gpt-2", ["I", "'ll", "Ġbe", "Ġ2024", "Ċ", "Ċ", "OK"]),
    ("smollm", ["I", "'ll", "Ġbe", "Ġ", "2", "0", "2", "4", "Ċ", "Ċ", "OK"]),
    ("qwen2", ["I", "'ll", "Ġbe", "Ġ", "2", "0", "2", "4", "ĊĊ", "OK"]),
    ("llama-bpe", ["I", "'ll", "Ġbe", "Ġ", "202", "4", "ĊĊ", "OK"]),
])  # fmt: skip
def test_texts_are_split_by_the_rule_that_the_file_names(pre: str, pieces: list[str], tmp_path: Path) -> None:
    splitter = _tokenizer(tmp_path, {"pre": pre}).backend_tokenizer.pre_tokenizer
    assert [piece for piece, _ in splitter.pre_tokenize_str("I'll be 2024\n\nOK")] == pieces


@pytest.mark.parametrize(("fields", "is_whole", "begins"), [
    ({"pre": "llama-bpe"}, True, True),
    ({"pre": "tekken"}, True, True),
    ({"pre": "llama-bpe", "add_bos_token": False}, True, False),
    ({"pre": "qwen2"}, False, False),
    ({"pre": "qwen2", "add_bos_token": True}, False, True),
])  # fmt: skip
def test_words_stay_whole_and_texts_begin_with_bos_as_in_llama_cpp(
    fields: dict[str, str | bool], is_whole: bool, begins: bool, tmp_path: Path
) -> None:
    tokenizer = _tokenizer(tmp_path, fields, merges=1)
    assert (tokenizer.tokenize(" the") == ["Ġthe"]) == is_whole  # no merge of the file makes it
    assert (tokenizer("the")["input_ids"][0] == tokenizer.bos_token_id) == begins


def test_what_the_file_adds_to_texts_is_added(tmp_path: Path) -> None:
    assert _tokenizer(tmp_path, {"add_eos_token": True})("the")["input_ids"][-1] == 2
    for add in (True, False):
        (tmp_path / str(add)).mkdir()
        tokenizer = _tokenizer(tmp_path / str(add), {"model": "llama", "add_space_prefix": add})
        ids = tokenizer("the end", add_special_tokens=False)["input_ids"]
        assert tokenizer.convert_ids_to_tokens(ids)[0].startswith("▁") == add
        assert tokenizer.decode(ids) == "the end"


def test_a_description_of_which_the_link_leads_elsewhere_is_made_again(tmp_path: Path) -> None:
    file, other = (write_gguf(tmp_path / name, FAMILIES["llama"][0], FIELDS) for name in ("a.gguf", "b.gguf"))
    link = described(file) / file.name
    for change in (link.symlink_to, lambda _: None):
        link.unlink()
        change(other)
        assert described(file) == link.parent and link.resolve() == file


def test_tensors_that_begin_where_others_do_are_damage(tmp_path: Path) -> None:
    """llama.cpp refuses such files, too: tensors follow each other in the order of the header."""
    from gguf import GGUFReader

    file = write_gguf(tmp_path / "model.gguf", FAMILIES["llama"][0], FIELDS)
    content = file.read_bytes()
    reader = GGUFReader(str(file))
    entries = [tensor.field.parts[-1] for tensor in reader.tensors]
    for first, second in itertools.pairwise(entries):
        for change in ((first, first), (second, second), (second, first)):
            damaged = content
            for entry, (number,) in zip((first, second), change, strict=True):
                at = entry.ctypes.data - reader.data.ctypes.data
                damaged = damaged[:at] + int(number).to_bytes(8, "little") + damaged[at + 8 :]
            file.write_bytes(damaged)
            with pytest.raises(UserError, match="does not begin after the tensor before it"):
                described(file)
    file.write_bytes(content)
    assert described(file)
