"""Every value in every file that somebody else may have written, in turn of another type: taken or rejected."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM

from cli.job.model import ChatTemplate, ModelChoice
from common.data.encode import Encoder
from common.data.examples import examples_of_records
from common.data.read import read_records
from common.errors import FinetuneError
from common.limits import limited
from common.models.adapters.adapters import Adapters
from common.models.adapters.options import load_peft_config
from common.models.checkpoint.shards import INDEX, SINGLE, Shards
from common.models.checkpoint.sources import CheckpointSource
from common.models.meta_model import build_meta_model
from common.models.presets import load_config
from common.models.structure import find_blocks
from tests.common.data.conftest import PLAIN_TEMPLATE, make_tokenizer

NESTED: Any = []
for _ in range(200):
    NESTED = [NESTED]
VALUES = [
    None, True, 0, -1, 3, 10**9, 10**30, 0.5, float("nan"), float("inf"), "", "x", "../x", [], [1], ["x"], [None], {},
    {"a": 1}, {"a": [{}]}, NESTED,
]  # fmt: skip
SECONDS, MEMORY = 20.0, 1 << 30  # of one file


def variants(content: Any) -> Iterator[tuple[str, Any]]:
    """Every copy of a JSON value in which one value, whole or inside, is another; with what has changed."""
    for value in VALUES:
        yield f"= {value!r:.20}", value
    for key in (
        content if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ()
    ):
        for change, value in variants(content[key]):
            copy = content.copy()
            copy[key] = value
            yield f"[{key!r}]{change}", copy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with all the files that one may have, and what goes with it."""
    path = tmp_path_factory.mktemp("checkpoint")
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    model.generation_config.max_length = 20
    model.save_pretrained(path)
    make_tokenizer(PLAIN_TEMPLATE).save_pretrained(path)
    weights = sorted(Shards(path).tensors)
    (path / "sharded").mkdir()
    (path / "sharded" / "a.safetensors").write_bytes((path / SINGLE).read_bytes())
    (path / "sharded" / INDEX).write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights, "a.safetensors")})
    )
    LoraConfig(r=2, target_modules=["q_proj"], rank_pattern={"q_proj": 3}).save_pretrained(
        str(path / "adapter")
    )
    records = {
        "text": {"text": "a", "more": [1]},
        "chat": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]},
                              {"role": "assistant", "content": "b", "reasoning_content": "c", "weight": 1,
                               "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]}],
                 "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]},
        "pair": {"prompt": "a", "chosen": "b", "rejected": "c", "label": True},
    }  # fmt: skip
    for name, record in records.items():
        (path / f"{name}.jsonl").write_text(json.dumps(record))
    return path


def _open_model(folder: Path) -> None:
    config, _ = load_config(folder)
    model = build_meta_model(config, checkpoint=folder)
    find_blocks(model)
    CheckpointSource(folder, model).check()


def _open_tokenizer(folder: Path) -> None:
    choice = ModelChoice(str(folder), "sft", None, ChatTemplate(None, None), 0)
    Encoder(choice.load_tokenizer())


def _open_adapter(folder: Path) -> None:
    config = load_peft_config(folder / "adapter")
    Adapters(build_meta_model(load_config(folder)[0], dtype=torch.float32), config, 0, draw=False)


def _encode(name: str) -> Callable[[Path], None]:
    encoder = Encoder(make_tokenizer(PLAIN_TEMPLATE), drop_unseen=True)

    def encode(folder: Path) -> None:
        list(encoder.encode(examples_of_records(read_records(folder / name))))

    return encode


FILES: dict[str, Callable[[Path], Any]] = {
    "config.json": _open_model,
    "generation_config.json": _open_model,
    "tokenizer_config.json": _open_tokenizer,
    "adapter/adapter_config.json": _open_adapter,
    f"sharded/{INDEX}": lambda folder: Shards(folder / "sharded"),
    **{f"{name}.jsonl": _encode(f"{name}.jsonl") for name in ("text", "chat", "pair")},
}


def _try(folder: Path, name: str, change: str, text: str) -> None:
    file = folder / name
    before = file.read_text()
    file.write_text(text)
    try:
        with limited(SECONDS, MEMORY):
            FILES[name](folder)
    except (FinetuneError, click.UsageError):
        pass
    except BaseException as error:
        raise AssertionError(f"{name}{change}: {type(error).__name__}: {error}") from error
    finally:
        file.write_text(before)


def _variants_of(folder: Path, name: str) -> list[tuple[str, str]]:
    return [
        (change, json.dumps(value)) for change, value in variants(json.loads((folder / name).read_text()))
    ]


@pytest.mark.parametrize("name", FILES)
def test_some_values_of_other_types_are_taken_or_rejected(folder: Path, name: str) -> None:
    for change, text in random.Random(0).sample(_variants_of(folder, name), 8):
        _try(folder, name, change, text)


def test_all_values_of_other_types_in_a_header_are_taken_or_rejected(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    }
    for change, value in variants(header):
        text = json.dumps(value).encode()
        (tmp_path / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + bytes(24))
        try:
            shards = Shards(tmp_path)
            for name in shards.tensors:
                shards.read(name)
        except FinetuneError:
            continue
        except Exception as error:
            raise AssertionError(f"{change}: {error!r}") from error
        assert value == header or change.startswith("['__metadata__']"), change


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_all_values_of_other_types_are_taken_or_rejected(folder: Path, name: str) -> None:
    failures = []
    for change, text in _variants_of(folder, name):
        try:
            _try(folder, name, change, text)
        except AssertionError as error:
            failures.append(str(error)[:300])
    assert not failures, "\n".join([f"{len(failures)} failures", *failures])
