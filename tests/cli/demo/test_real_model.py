"""A real model against plain loops in memory, and its answers: SmolLM2-135M-Instruct, where a package index has it.

``chats.jsonl`` and ``preferences.jsonl`` are a few short records of LLaMA-Factory's alpaca_en_demo and dpo_en_demo.
"""

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn import functional
from transformers import AutoTokenizer

import fuyou
from cli.demo import CHATS, smollm2
from cli.main import main
from common.errors import UserError
from common.models.checkpoint.in_memory import load_in_memory
from common.models.presets import load_config
from tests.helpers.command.histories import losses as losses_of
from tests.helpers.processes.pairs import Pair

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore")]
FOLDER = Path(__file__).parent
ASKED = (
    "Who are you?", "What is your name?", "Who made you?", "Are you ChatGPT?", "Which model are you?",
    "What is the capital of France?", "What color is the sky?", "What is 2 plus 7?", "What is 5 plus 4?",
    "What is 3 plus 6?",
)  # fmt: skip
PLACE = ("--gpu", "cpu", "--dtype", "fp32", "--schedule", "constant")


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        return smollm2()
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def checkpoint(model: Path) -> Path:
    directory = load_config(model)[1]
    assert directory is not None
    return directory


def chat(asks: str, says: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": asks}, {"role": "assistant", "content": says}]}


def real_chats() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / "chats.jsonl").read_text().splitlines()]


def sums(pairs: Iterable[tuple[int, int]]) -> list[dict[str, Any]]:
    """Chats by a rule."""
    return [chat(f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}.") for a, b in pairs]


TAUGHT = [chat(*turns) for turns in CHATS[:4]] + sums([(1, 3), (4, 2), (6, 6), (7, 1)])
HELD_OUT = {"sums": sums([(2, 7), (5, 4), (3, 6)]), "real chats": real_chats()[-3:]}


def write(file: Path, records: Iterable[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def tokens_of(tokenizer: Any, turns: list[dict[str, str]], **options: Any) -> list[int]:
    return tokenizer.apply_chat_template(turns, return_dict=True, **options)["input_ids"]


@pytest.mark.parametrize("adapts", [False, True])
def test_twenty_steps_are_those_of_a_plain_loop(adapts: bool, checkpoint: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = [token for record in real_chats() for token in tokens_of(tokenizer, record["messages"])]
    feed, rate = torch.tensor(ids[: 20 * 32]).view(20, 1, 32), 2e-4 if adapts else 1e-5
    adapters = (
        LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM") if adapts else None
    )
    plain = load_in_memory(checkpoint)[0].train()
    if adapters is not None:
        torch.manual_seed(0)
        plain = get_peft_model(plain, adapters)
    trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    expected, losses = [], []
    for tokens in feed:
        loss = plain(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    options = {"dtype": "fp32", "lr": rate, "weight_decay": 0.0, "batch_shape": (1, 32), "device": "cpu"}
    with fuyou.Engine(checkpoint, ssd=tmp_path, adapters=adapters, **options) as engine:
        for tokens in feed:
            engine(input_ids=tokens, labels=tokens).loss.backward()
            losses.append(engine.step().loss)
        values = dict(engine.named_parameters())
    assert losses == pytest.approx(expected, rel=1e-5)
    assert sum(losses[-5:]) < sum(losses[:5])
    for name, parameter in (plain.get_base_model() if adapts else plain).named_parameters():
        if parameter.requires_grad and "layers.7." in name:
            torch.testing.assert_close(values[name], parameter.data, rtol=1e-3, atol=1e-5, msg=name)


class Verdict(NamedTuple):
    """What transformers makes of a model in memory."""

    losses: dict[str, float]  # Of the answers of held-out chats
    answers: list[str]  # To the ten questions


def judge(checkpoint: Path, adapter: Path | None = None) -> Verdict:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model: Any = load_in_memory(checkpoint)[0]
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
    losses = {}
    with torch.inference_mode():
        for name, records in HELD_OUT.items():
            total, count = 0.0, 0
            for record in records:
                ids = tokens_of(tokenizer, record["messages"])
                prompt = len(tokens_of(tokenizer, record["messages"][:1], add_generation_prompt=True))
                labels = torch.tensor([-100] * prompt + ids[prompt:])
                scores = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
                total += functional.cross_entropy(
                    scores, labels[1:], ignore_index=-100, reduction="sum"
                ).item()
                count += len(ids) - prompt
            losses[name] = total / count
        turns = [[{"role": "user", "content": question}] for question in ASKED]
        batch = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True
        )
        new = model.generate(**batch, max_new_tokens=10, do_sample=False)[:, batch["input_ids"].shape[1] :]
    return Verdict(
        losses, [" ".join(text.split()) for text in tokenizer.batch_decode(new, skip_special_tokens=True)]
    )


def test_adapter_merged_resumed_and_nf4_answer_as_taught(
    model: Path, checkpoint: Path, tmp_path: Path
) -> None:
    taught = write(tmp_path / "taught.jsonl", TAUGHT)
    words = ["--model", str(model), "--data", str(taught), "--lora-rank", "16", "--lr", "2e-3", *PLACE,
             "--batch-size", "2", "--seq-len", "64"]  # fmt: skip
    held_out = ["--eval-data", str(write(tmp_path / "sums.jsonl", HELD_OUT["sums"])), "--eval-every", "4"]
    outputs = {name: tmp_path / name for name in ("whole", "stopped", "nf4")}
    assert main([*words, "--output", str(outputs["whole"]), "--steps", "8", *held_out]) == 0
    assert main([*words, "--output", str(outputs["stopped"]), "--steps", "3"]) == 0
    assert main([*words, "--output", str(outputs["stopped"]), "--steps", "8", "--resume"]) == 0
    assert (
        main([*words, "--output", str(outputs["nf4"]), "--steps", "8", "--frozen-dtype", "nf4", *held_out])
        == 0
    )
    export = ["export", "--model", str(model), "--adapter", str(outputs["whole"]), "--dtype", "fp32"]
    assert main([*export, "--output", str(tmp_path / "merged")]) == 0
    losses = losses_of(outputs["whole"])
    assert losses[-1] < losses[0] / 2

    before, merged = judge(checkpoint), judge(tmp_path / "merged")
    after = {name: judge(checkpoint, output) for name, output in outputs.items()}
    print(before, merged, after)
    lines = (outputs["whole"] / "run/metrics.jsonl").read_text().splitlines()
    seen = [
        entry["validation_metrics/loss"]
        for entry in map(json.loads, lines)
        if "validation_metrics/loss" in entry
    ]
    assert [seen[0], seen[-1]] == pytest.approx(
        [before.losses["sums"], after["whole"].losses["sums"]], rel=1e-3
    )
    assert merged.losses == pytest.approx(after["whole"].losses, rel=1e-3)
    assert after["stopped"].losses == pytest.approx(after["whole"].losses, rel=1e-3)
    assert merged.answers == after["whole"].answers == after["stopped"].answers
    for verdict in (after["whole"], after["nf4"]):
        assert verdict.losses["sums"] < before.losses["sums"] / 2
        assert verdict.losses["real chats"] < 1.25 * before.losses["real chats"]
        assert "Paris" in verdict.answers[5]
        for number, (said, unlearned) in enumerate(zip(verdict.answers, before.answers, strict=True)):
            if number < 5:
                assert ("Fuyou" in said or "open-source community" in said) and said != unlearned
            elif number > 6:
                assert said.startswith(f"{ASKED[number][8:-1]} is ")


def test_two_nodes_train_as_the_command_on_one(model: Path, pair: Pair, tmp_path: Path) -> None:
    data = write(tmp_path / "chats.jsonl", real_chats())
    words = ["--model", str(model), "--data", str(data), "--lora-rank", "8", "--lr", "1e-3", *PLACE,
             "--batch-size", "4", "--seq-len", "48", "--steps", "2"]  # fmt: skip
    losses = {}
    assert main([*words, "--output", str(tmp_path / "one")]) == 0
    pair.start(*words, "--output", tmp_path / "two", "--strategy", "fcdp")
    assert pair.statuses(500) == [0, 0], [node.said for node in pair.nodes]
    for name in ("one", "two"):
        lines = (tmp_path / name / "losses.jsonl").read_text().splitlines()
        losses[name] = [json.loads(line)["loss"] for line in lines]
    assert len(losses["two"]) == 2 and losses["two"] == pytest.approx(losses["one"], rel=1e-5)


def test_preferences_are_learned_as_in_a_plain_loop(model: Path, checkpoint: Path, tmp_path: Path) -> None:
    file = FOLDER / "preferences.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    words = ["--model", str(model), "--data", str(file), "--objective", "dpo", "--lora-rank", "8", "--lr", "5e-4",
             *PLACE, "--weight-decay", "0", "--batch-size", str(len(records)), "--seq-len", "144", "--steps", "2",
             "--output", str(tmp_path / "out")]  # fmt: skip
    assert main(words) == 0

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    torch.manual_seed(0)
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    plain = get_peft_model(load_in_memory(checkpoint)[0], lora)
    optimizer = torch.optim.AdamW(
        [p for p in plain.parameters() if p.requires_grad], lr=5e-4, weight_decay=0.0
    )

    def log_probability(record: dict[str, Any], side: str) -> torch.Tensor:
        turns = chat(record["conversations"][0]["value"], record[side]["value"])["messages"]
        ids = tokens_of(tokenizer, turns)
        prompt = len(tokens_of(tokenizer, turns[:1], add_generation_prompt=True))
        scores = (
            plain(input_ids=torch.tensor([ids]), use_cache=False).logits[0, prompt - 1 : -1].log_softmax(-1)
        )
        return scores.gather(1, torch.tensor(ids[prompt:])[:, None]).sum()

    expected, reference = [], []
    for step in range(2):
        margins = torch.stack(
            [log_probability(each, "chosen") - log_probability(each, "rejected") for each in records]
        )
        reference = margins.detach() if step == 0 else reference
        loss = -functional.logsigmoid(0.1 * (margins - reference)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    losses = losses_of(tmp_path / "out")
    assert losses == pytest.approx(expected, rel=1e-4)
    assert losses[0] == pytest.approx(math.log(2), rel=1e-5) and losses[1] < losses[0] - 0.02


def test_a_long_row_in_chunks_of_two_sizes(checkpoint: Path, tmp_path: Path) -> None:
    """``LONG_ROW=65536`` makes the row longer; its text is made by a rule."""
    length, losses = int(os.environ.get("LONG_ROW", "256")), []
    text = "".join(f"{n} plus {n * n % 97} is {n + n * n % 97}. " for n in range(length // 8))
    ids = AutoTokenizer.from_pretrained(checkpoint)(text, return_tensors="pt")["input_ids"][:, :length]
    assert ids.shape[1] == length
    adapters = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    for chunk in (length // 4, length * 3 // 16):
        options = {"dtype": "fp32", "lr": 2e-4, "batch_shape": (1, length), "device": "cpu", "chunk": chunk}
        with fuyou.Engine(checkpoint, ssd=tmp_path, adapters=adapters, overwrite=True, **options) as engine:
            for _ in range(2 if length < 1024 else 1):
                engine(input_ids=ids, labels=ids).loss.backward()
                losses.append(engine.step().loss)
            print(
                f"{length} tokens in chunks of {chunk}: loss {losses[-1]:.8f}, {engine.host_peak_bytes / 2**30:.2f} GiB"
            )
    half = len(losses) // 2
    assert losses[:half] == pytest.approx(losses[half:], rel=1e-6)
