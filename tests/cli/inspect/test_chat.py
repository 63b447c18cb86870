"""``finetune chat`` answers with what transformers generates for the whole conversation."""

import io
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from cli.inspect import chat
from tests.cli.conftest import Finetune

LINES = ["Two and two", "And one more"]


def expected(model: Any, tokenizer: Any) -> list[str]:
    messages: list[dict[str, str]] = []
    for line in LINES:
        messages.append({"role": "user", "content": line})
        text: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        prompt = ids.shape[1]
        with torch.no_grad():
            while ids.shape[1] < prompt + 12 and ids[0, -1] != tokenizer.eos_token_id:
                ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
        messages.append(
            {"role": "assistant", "content": tokenizer.decode(ids[0, prompt:], skip_special_tokens=True)}
        )
    return [message["content"] for message in messages[1::2]]


def save_with_context(checkpoint: Path, folder: Path, context: int, **generation: Any) -> tuple[Any, Any]:
    """Save the checkpoint as a model of another context; return model and tokenizer."""
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model.config.max_position_embeddings = context
    model.generation_config.update(**generation)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


@pytest.mark.parametrize("adapted", [False, True])
def test_answers(
    adapted: bool, finetune: Finetune, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = save_with_context(checkpoint, tmp_path / "model", 128)
    words: list[Any] = ["chat", "--model", tmp_path / "model"]
    if adapted:
        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
        base = AutoModelForCausalLM.from_pretrained(checkpoint)
        model, words = (
            PeftModel.from_pretrained(base, tmp_path / "adapter"),
            [*words, "--adapter", tmp_path / "adapter"],
        )
    monkeypatch.setattr(chat, "MOST_TOKENS", 12)
    monkeypatch.setattr("sys.stdin", io.StringIO("\n\n".join(LINES)))
    done = finetune(*words)
    assert done.status == 0, done.err
    assert done.out == "".join(f"{answer}\n" for answer in expected(model, tokenizer))


def test_a_gpu_that_holds_the_weights_alone_is_not_taken(
    finetune: Finetune, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values of the conversation take memory, too."""
    save_with_context(checkpoint, tmp_path / "model", 128)
    weights = sum(file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (weights + (1 << 30), 8 << 30))
    monkeypatch.setattr(chat, "MOST_TOKENS", 3)
    monkeypatch.setattr("sys.stdin", io.StringIO("Two"))
    done = finetune("chat", "--model", tmp_path / "model")
    assert done.status == 0, done.err


def test_says_where_an_answer_is_cut(
    finetune: Finetune, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the most tokens of an answer, at the end of the context, and where no question fits any more."""
    turns = [{"role": "user", "content": "Two"}]
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    prompt: Any = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
    context = len(prompt["input_ids"]) + 9
    save_with_context(checkpoint, tmp_path, context, eos_token_id=None)
    for limit, lines, says in (
        (3, "Two", "(cut after 3 tokens)"),
        (12, "Two", f"(the model's context of {context} tokens is full)"),
        (12, "Two\nAnd", f"tokens, and the model's context {context}: start another."),
    ):
        monkeypatch.setattr(chat, "MOST_TOKENS", limit)
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        done = finetune("chat", "--model", tmp_path)
        assert done.err.splitlines()[-1].endswith(says) and done.status == (2 if "And" in lines else 0)


def test_rejects_what_does_not_fit(
    finetune: Finetune, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "memory_available_bytes", lambda: 1000)
    done = finetune("chat", "--model", checkpoint)
    assert done.status == 2 and "1000 B of memory are free: chat needs all of it in memory" in done.err
    assert "preset" in finetune("chat", "--model", "llama-10m").err


def test_incomplete_models_and_classifiers_are_rejected(
    finetune: Finetune, checkpoint: Path, tmp_path: Path
) -> None:
    """Transformers and peft fill in random values, or those before training, and only log it."""
    tokenizer, model = (
        AutoTokenizer.from_pretrained(checkpoint),
        AutoModelForCausalLM.from_pretrained(checkpoint),
    )
    names = ("classifier", "lacking", "adapter", "wide", "damaged", "of a classifier", "damaged adapter")
    parts = {name: tmp_path / name for name in names}
    config = AutoConfig.from_pretrained(checkpoint, num_labels=2)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(parts["classifier"])
    for name in ("lacking", "damaged"):
        shutil.copytree(checkpoint, parts[name])
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
    for name in ("adapter", "wide", "of a classifier", "damaged adapter"):
        adapted.save_pretrained(parts[name])
        tokenizer.save_pretrained(parts[name])

    def change(file: Path, **changes: Any) -> str:
        tensors = load_file(file)
        name = next(name for name in tensors if "layers.1" in name)
        tensors.pop(name) if not changes else tensors.update({name: torch.zeros(3, 3)})
        save_file(tensors, file, {"format": "pt"})
        return name

    lost = change(parts["lacking"] / "model.safetensors")
    lost_adapter = change(parts["adapter"] / "adapter_model.safetensors")
    change(parts["wide"] / "adapter_model.safetensors", shape=True)
    for name, file in (("damaged", "model.safetensors"), ("damaged adapter", "adapter_model.safetensors")):
        tensors = load_file(parts[name] / file)
        next(value for name, value in tensors.items() if "layers.1" in name).view(-1)[0] = torch.nan
        save_file(tensors, parts[name] / file, {"format": "pt"})
    head = parts["of a classifier"] / "adapter_model.safetensors"
    save_file({**load_file(head), "base_model.model.score.weight": torch.ones(2, 32)}, head, {"format": "pt"})
    for words, message in (
        (("--model", parts["damaged"]), "holds a NaN or an infinity, in model.layers.1."),
        (("--model", checkpoint, "--adapter", parts["damaged adapter"]), "holds a NaN or an infinity"),
        (
            ("--model", checkpoint, "--adapter", parts["of a classifier"]),
            "holds base_model.model.score.weight, which",
        ),
        (("--model", parts["classifier"]), "which writes no text"),
        (("--model", parts["lacking"]), f"lacks {lost}"),
        (("--model", checkpoint, "--adapter", parts["adapter"]), f"lacks {lost_adapter}"),
        (("--model", checkpoint, "--adapter", parts["wide"]), "is that of another model"),
    ):
        done = finetune("chat", *words)
        assert done.status == 2 and message in done.err, done.err
