"""``--sample`` prints what transformers generates with the saved result, and a failure there does not fail the run."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationMixin, PreTrainedModel

from cli.train import export
from tests.cli.conftest import Finetune

TOKENS = 12
TRAIN = ("--steps", 2, "--seq-len", 32, "--batch-size", 2, "--dtype", "fp32", "--lr", 0.03)
SAMPLE = ("--sample", "Two and two", "--sample-tokens", TOKENS)
LORA = ("--lora-rank", 4)


def trained(finetune: Finetune, checkpoint: Path, data: Path, *words: Any) -> str:
    outcome = finetune("--model", checkpoint, "--data", data, "--output", "out", *TRAIN, *SAMPLE, *words)
    assert outcome.status == 0, outcome.err
    return outcome.out


def expected(checkpoint: Path, kind: str, chat: bool = True) -> str:
    """Return what the run has to print, by its own loop over the saved model."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    text = "<|start|><|turn|>user\nTwo and two\n<|turn|>assistant\n" if chat else "<|start|>Two and two"
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    source = {"full": "out", "merged": "out/merged", "adapters": checkpoint}[kind]
    model: Any = AutoModelForCausalLM.from_pretrained(source)
    if kind == "adapters":
        model = PeftModel.from_pretrained(model, "out")
    prompt = ids.shape[1]
    with torch.no_grad():
        while ids.shape[1] < prompt + TOKENS and ids[0, -1] != tokenizer.eos_token_id:
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
    answer = tokenizer.decode(ids[0, prompt:], skip_special_tokens=True)
    return f"\nsample   Two and two{answer}\n         ({ids.shape[1] - prompt} tokens in "


@pytest.mark.parametrize(
    ("kind", "words", "fits"),
    [("full", (), True), ("full", (), False), ("adapters", LORA, False), ("merged", (*LORA, "--merge"), True)],
)
def test_prints_what_the_saved_model_generates(
    kind: str, words: tuple[Any, ...], fits: bool, finetune: Finetune, checkpoint: Path, data: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    on_disk, loaded = [], export._load
    if not fits:
        monkeypatch.setattr(export, "memory_limits", lambda *_: (100_000, 100_000))

    def load(*arguments: Any) -> Any:
        model = loaded(*arguments)
        on_disk.append("disk" in getattr(model, "hf_device_map", {}).values())
        return model

    monkeypatch.setattr(export, "_load", load)
    shown = trained(finetune, checkpoint, data, *words)
    assert expected(checkpoint, kind) in shown
    assert on_disk == [not fits]
    assert not list(Path("out").glob("sample-*"))


def test_without_a_chat_template_the_prompt_is_plain_text(finetune: Finetune, own_checkpoint: Path, data: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(own_checkpoint)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(own_checkpoint)
    (own_checkpoint / "chat_template.jinja").unlink(missing_ok=True)
    shown = trained(finetune, own_checkpoint, data)
    assert expected(own_checkpoint, "full", chat=False) in shown


def test_a_failing_sample_does_not_fail_the_run(
    finetune: Finetune, checkpoint: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("none\nleft")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", fail)
    assert "\nsample   failed: MemoryError: none left; the result is saved\n" in trained(finetune, checkpoint, data)
    assert Path("out/model.safetensors").exists()


def test_ctrl_c_ends_the_sample_alone(
    finetune: Finetune, checkpoint: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GenerationMixin, "generate", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    assert "\nsample   stopped; the result is saved\n" in trained(finetune, checkpoint, data)


@pytest.mark.parametrize(("words", "message"), [
    (("--no-save",), "--sample generates with the saved result: leave --no-save out."),
    (("--objective", "classify"), "--sample generates text, which a model of --objective classify cannot"),
    (("--objective", "reward"), "--sample generates text, which a model of --objective reward cannot"),
])  # fmt: skip
def test_what_cannot_be_sampled(
    words: tuple[str, ...], message: str, finetune: Finetune, checkpoint: Path, data: Path
) -> None:
    outcome = finetune("--model", checkpoint, "--data", data, *SAMPLE, *words)
    assert outcome.status == 2 and message in outcome.err
