"""Weights that have changed since a run began are noticed when it is continued, and when its adapters are used."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cli.train.engine_trainer import EngineTrainer
from tests.cli.conftest import Finetune
from tests.helpers.command.messages import check

pytestmark = pytest.mark.slow

SMALL = ("--batch-size", "2", "--seq-len", "32", "--gpu", "cpu")


@pytest.mark.parametrize(
    "words", [(), ("--lora-rank", 2), ("--lora-rank", 2, "--nodes", 1)], ids=["full", "lora", "ranks"]
)
def test_a_run_does_not_continue_with_other_weights(
    words: tuple[object, ...], finetune: Finetune, own_checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    output, weights = tmp_path / "out", own_checkpoint / "model.safetensors"
    begun = finetune(
        "--model", own_checkpoint, "--data", data, *SMALL, "--steps", 1, "--output", output, *words
    )
    assert begun.status == 0, begun.err
    before = load_file(weights)
    save_file({name: value + 1e-3 for name, value in before.items()}, weights, metadata={"format": "pt"})
    refused = finetune("--output", output, "--resume", "--steps", 2)
    assert refused.status != 0 and "began with" in refused.err, refused.err
    save_file(before, weights, metadata={"format": "pt"})
    done = finetune("--output", output, "--resume", "--steps", 2)
    assert done.status == 0, done.err


def test_adapters_are_used_with_a_warning(
    finetune: Finetune, own_checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    adapter, weights = tmp_path / "adapter", own_checkpoint / "model.safetensors"
    command = ("--model", own_checkpoint, "--data", data, *SMALL, "--steps", 1)
    assert finetune(*command, "--lora-rank", 2, "--output", adapter).status == 0

    def warnings(name: str) -> list[int]:
        merged = finetune(
            "export", "--model", own_checkpoint, "--adapter", adapter, "--output", tmp_path / f"{name}-m"
        )
        further = finetune(*command, "--adapter", adapter, "--output", tmp_path / f"{name}-f", "--no-save")
        assert merged.status == further.status == 0, merged.err + further.err
        return [outcome.out.count("are not those that") for outcome in (merged, further)]

    assert warnings("same") == [0, 0]
    before = load_file(weights)
    save_file({name: value + 1e-3 for name, value in before.items()}, weights, metadata={"format": "pt"})
    assert warnings("changed") == [1, 1]
    adapter = shutil.copytree(adapter, tmp_path / "others", ignore=shutil.ignore_patterns("run"))
    others = adapter / "adapter_model.safetensors"
    save_file(load_file(others), others, metadata={"format": "pt"})  # as peft saves them
    assert warnings("unknown") == [0, 0]
    assert all(torch.isfinite(value).all() for value in load_file(others).values())


def test_a_directory_without_a_run_is_named(finetune: Finetune, tmp_path: Path) -> None:
    (tmp_path / "tuned-model").mkdir()
    check(
        finetune("--output", "tuned-modle", "--resume"),
        2,
        "There is no run in",
        "Did you mean",
        "tuned-model",
    )


def _add_template(model: Path) -> None:
    folder = model / "additional_chat_templates"
    folder.mkdir()
    (folder / "tools.jinja").write_text("{{ messages }}")


def _change_generation(model: Path) -> None:
    file = model / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "temperature": 0.5}))


def _change_tokenizer(model: Path) -> None:
    """As it is rendered for generation only: the tokens of the data stay as they were."""
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "clean_up_tokenization_spaces": True}))


CHANGES: dict[str, Callable[[Path], None]] = {
    "additional_chat_templates/tools.jinja was added": _add_template,
    "generation_config.json has changed": _change_generation,
    "tokenizer_config.json has changed": _change_tokenizer,
    "generation_config.json is gone": lambda model: (model / "generation_config.json").unlink(),
}


@pytest.mark.parametrize("words", [(), ("--lora-rank", 2, "--nodes", 1)], ids=["full", "ranks"])
def test_other_files_next_to_the_weights_are_refused(
    words: tuple[object, ...], finetune: Finetune, checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    begun = finetune("--model", checkpoint, "--data", data, *SMALL, "--steps", 1, "--output", output, *words)
    assert begun.status == 0, begun.err
    result = {path.name: path.read_bytes() for path in output.iterdir() if path.is_file()}
    for number, (message, change) in enumerate(list(CHANGES.items())[: 1 if words else None]):
        model = shutil.copytree(checkpoint, tmp_path / f"changed-{number}")
        change(model)
        for line in (("--output", output, "--resume", "--steps", 2), ("export", "--output", output)):
            refused = finetune(*line, "--model", model)
            assert refused.status == 2, refused.err
            assert f"{model}/{message}" in refused.err and "give --model" in refused.err, refused.err
    assert result == {path.name: path.read_bytes() for path in output.iterdir() if path.is_file()}
    done = finetune("--output", output, "--resume", "--steps", 2)
    assert done.status == 0, done.err


def test_files_that_change_during_the_run_are_not_written(
    finetune: Finetune, own_checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, before = tmp_path / "out", (own_checkpoint / "tokenizer_config.json").read_bytes()
    commit = EngineTrainer.commit

    def change(trainer: EngineTrainer) -> None:
        commit(trainer)
        _change_tokenizer(own_checkpoint)

    line = ("--model", own_checkpoint, "--data", data, *SMALL, "--steps", 1, "--output", output)
    with monkeypatch.context() as patch:
        patch.setattr(EngineTrainer, "commit", change)
        check(finetune(*line), 2, "tokenizer_config.json has changed since this run began")
    assert not (output / "config.json").exists()
    (own_checkpoint / "tokenizer_config.json").write_bytes(before)
    assert finetune("--output", output, "--resume").status == 0
    assert (output / "tokenizer_config.json").read_bytes() == before


def test_a_changed_template_of_the_answers_is_refused(
    finetune: Finetune, checkpoint: Path, tmp_path: Path
) -> None:
    """Where no record of the data uses the part that changed."""
    data, template = tmp_path / "data.jsonl", tmp_path / "template.jinja"
    talk = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "It is a test."}]
    data.write_text(json.dumps({"messages": talk}) + "\n")
    text = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    template.write_text(text)
    line = (
        "--model",
        checkpoint,
        "--data",
        data,
        *SMALL,
        "--output",
        tmp_path / "out",
        "--chat-template",
        template,
    )
    begun = finetune(*line, "--steps", 1)
    assert begun.status == 0, begun.err
    template.write_text(text + "{% if tools %}{{ tools }}{% endif %}")
    check(
        finetune("--output", tmp_path / "out", "--resume", "--steps", 2), 2, "the chat template has changed"
    )
