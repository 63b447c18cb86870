"""An adapter comes with the tokenizer and the chat template that it was trained with: all commands take these."""

import io
import json
import shutil
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, MistralConfig, Qwen2Config

from cli.inspect import chat
from cli.job.model import ChatTemplate
from common.data.demo_text import train_demo_tokenizer
from common.models.checkpoint.companions import Companions, doubt_about
from common.models.checkpoint.writer import write_template
from common.models.presets import load_config
from tests.cli.conftest import Finetune

TALK = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "This."}]
TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
SMALL = ("--batch-size", 1, "--seq-len", 64, "--gpu", "cpu", "--dtype", "fp32")


@pytest.fixture
def adapter(checkpoint: Path, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint), config).save_pretrained(
        tmp_path / "adapter"
    )
    return tmp_path / "adapter"


@pytest.fixture
def talk(tmp_path: Path) -> Path:
    file = tmp_path / "talk.jsonl"
    file.write_text(json.dumps({"messages": TALK}) + "\n")
    return file


def companions(checkpoint: Path, adapter: Path) -> tuple[Companions, Any]:
    both = Companions(checkpoint, adapter)
    return both, both.load_tokenizer(load_config(checkpoint)[0])


def test_a_tokenizer_splits_texts_as_its_file_says(tmp_path: Path) -> None:
    written = Tokenizer(models.BPE())
    digits = pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?\p{L}+|\s+|."), "isolated")
    written.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    written.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<e>"], show_progress=False
    )
    written.train_from_iterator(["In 2024 and 1234567, in 2024 and 1234567"] * 9, trainer)
    written.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    text = "In 1234567: cafe\u0301"
    for kind in ("PreTrainedTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer"):
        config = {"tokenizer_class": kind, "eos_token": "<e>"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = Companions(tmp_path).load_tokenizer(Qwen2Config())
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == written.encode(text).ids and tokenizer.decode(ids) == text
        assert tokenizer.eos_token_id == written.token_to_id("<e>")


@pytest.mark.parametrize(("version", "flag", "doubtful"), [
    ("4.50.0", None, True), ("4.50.0", True, True), ("4.50.0", False, False), ("5.0.0", None, False),
])  # fmt: skip
def test_a_rule_that_transformers_doubts_is_named(
    version: str, flag: bool | None, doubtful: bool, tmp_path: Path
) -> None:
    words = [*pre_tokenizers.ByteLevel.alphabet(), "20", *(f"<{number}>" for number in range(100_000))]
    written = Tokenizer(models.BPE({word: at for at, word in enumerate(words)}, [("2", "0")]))
    digits = pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?\p{L}+|\s+|."), "isolated")
    written.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "mistral", "transformers_version": version})
    )
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | (
        {} if flag is None else {"fix_mistral_regex": flag}
    )
    written.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Companions(tmp_path).load_tokenizer(MistralConfig())
    said = doubt_about(tokenizer, tmp_path)
    assert ("fix_mistral_regex=True" in said) == doubtful


def test_every_command_takes_the_template_of_an_adapter(
    finetune: Finetune,
    checkpoint: Path,
    adapter: Path,
    talk: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ("--model", checkpoint, "--adapter", adapter)

    def loss(*more: Any) -> str:
        done = finetune("evaluate", *words, "--data", talk, *SMALL, *more)
        assert done.status == 0, done.err
        return next(line for line in done.out.splitlines() if line.startswith("eval")).partition(
            ", perplexity"
        )[0]

    (tmp_path / "other.jinja").write_text(TEMPLATE)
    plain, other = loss(), loss("--chat-template", tmp_path / "other.jinja")
    assert plain != other
    (adapter / "chat_template.jinja").write_text(TEMPLATE)
    assert loss() == other
    shown = finetune(
        "train", *words, "--data", talk, *SMALL, "--show-data", 1, "--output", tmp_path / "shown"
    )
    assert shown.status == 0 and "<user>What?" in shown.out, shown.err
    outputs = [tmp_path / name for name in ("trained", "merged")]
    trained = finetune("train", *words, "--data", talk, *SMALL, "--steps", 1, "--output", outputs[0])
    merged = finetune("export", *words, "--output", outputs[1])
    assert trained.status == merged.status == 0, trained.err + merged.err
    for output in outputs:
        assert (output / "chat_template.jinja").read_text() == TEMPLATE
        assert AutoTokenizer.from_pretrained(output).chat_template == TEMPLATE
    (adapter / "chat_template.jinja").write_text(TEMPLATE + " ")
    refused = finetune("export", "--output", outputs[0])
    assert refused.status == 2 and f"{adapter}/chat_template.jinja has changed" in refused.err, refused.err

    prompts: list[str] = []

    def answer(tokenizer: Any, config: Any, original: Any = chat._tokenizer) -> Any:
        result = original(tokenizer, config)
        prompts.append(result.chat_template)
        return result

    monkeypatch.setattr(chat, "_tokenizer", answer)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert finetune("chat", *words).status == 0
    assert prompts == [TEMPLATE + " "]


def _templates(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder).chat_template


@pytest.mark.parametrize("has_others", [False, True])
def test_templates_of_a_model_do_not_win_over_those_of_a_result(
    has_others: bool, checkpoint: Path, adapter: Path, tmp_path: Path
) -> None:
    """Records with tools take the template ``tool_use`` if there is one, and processors ``chat_template.json``."""
    model, result = (shutil.copytree(checkpoint, tmp_path / name) for name in ("model", "result"))
    for folder in (model, result):
        write_template(folder, {"default": "base", "tool_use": "tools of the base"})
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": "older"}))
    expected: Any = {"default": TEMPLATE, "tool_use": "tools"} if has_others else TEMPLATE
    write_template(adapter, expected)
    both, loaded = companions(model, adapter)
    assert loaded.chat_template == expected
    both.write(result)
    assert _templates(result) == expected and not (result / "chat_template.json").exists()
    digests = {name for folder, name in both.digests() if folder == adapter}
    assert ("additional_chat_templates/tool_use.jinja" in digests) == has_others

    ChatTemplate(TEMPLATE, date(2026, 1, 1)).write(model)  # --chat-template
    assert _templates(model) == TEMPLATE and not (model / "chat_template.json").exists()


@pytest.mark.slow
def test_every_command_takes_the_tokenizer_of_an_adapter(
    finetune: Finetune, checkpoint: Path, adapter: Path, talk: Path, tmp_path: Path
) -> None:
    """One of other tokens, as other tools save it next to their adapters."""
    words = ("--model", checkpoint, "--adapter", adapter)
    outputs = [tmp_path / name for name in ("trained", "merged")]

    def shown() -> str:
        done = finetune(
            "train", *words, "--data", talk, *SMALL, "--show-data", 1, "--output", tmp_path / "shown"
        )
        assert done.status == 0, done.err
        return done.out

    before = shown()
    train_demo_tokenizer(300, adapter)
    text = "The number of the other things"
    plain, tokenizer = AutoTokenizer.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(adapter)
    assert plain.encode(text) != tokenizer.encode(text)
    assert companions(checkpoint, adapter)[1].encode(text) == tokenizer.encode(text)
    assert shown() != before
    trained = finetune("train", *words, "--data", talk, *SMALL, "--steps", 1, "--output", outputs[0])
    merged = finetune("export", *words, "--output", outputs[1])
    assert trained.status == merged.status == 0, trained.err + merged.err
    for output in outputs:
        assert AutoTokenizer.from_pretrained(output).encode(text) == tokenizer.encode(text)


def test_what_an_adapter_does_not_have_is_the_model_s(
    checkpoint: Path, adapter: Path, tmp_path: Path
) -> None:
    plain = AutoTokenizer.from_pretrained(checkpoint)
    both, loaded = companions(checkpoint, adapter)
    assert both.tokenizer == checkpoint and loaded.chat_template == plain.chat_template
    for file in both.files:
        shutil.copy(file, adapter)
    assert companions(checkpoint, adapter)[0].tokenizer == checkpoint  # a copy
    plain.add_tokens(["abc"])
    plain.chat_template = None
    shutil.rmtree(adapter / "additional_chat_templates", ignore_errors=True)
    (adapter / "chat_template.jinja").unlink(missing_ok=True)
    plain.save_pretrained(adapter)
    both, loaded = companions(checkpoint, adapter)
    assert both.tokenizer == adapter
    assert loaded.chat_template == AutoTokenizer.from_pretrained(checkpoint).chat_template is not None
    folder = tmp_path / "result"
    shutil.copytree(checkpoint, folder)
    both.write(folder)
    assert AutoTokenizer.from_pretrained(folder).chat_template == loaded.chat_template
    assert {name for _, name in both.digests()} >= {"tokenizer.json", "tokenizer_config.json"}
