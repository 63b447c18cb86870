"""Every exported directory, loaded by transformers or peft in a fresh process, evaluates to what the run evaluated."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedConfig

from common.data.demo_text import train_demo_tokenizer
from tests.cli.conftest import Finetune
from tests.helpers.models.families import family_config
from tests.helpers.models.small_checkpoints import SIZES

TEXTS = [{"text": f"{i} and {i * i} are numbers", "label": ("odd", "even")[i % 2]} for i in range(6)]
PAIRS = [{"prompt": f"{i} is", "chosen": f" {i}, surely.", "rejected": " a word."} for i in range(6)]
MIXTURE = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
LORA = ("--lora-rank", 4, "--lora-targets")
ATTENTION = (*LORA, "q_proj")
PEFT = {  # configurations in files, as peft writes them
    "head.json": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "rows.json": {"r": 4, "target_modules": ["q_proj"], "trainable_token_indices": list(range(40, 120))},
}
ALONE = ("--gpu", "cpu", "--host-memory", "600MiB")
RANKS = ("--nodes", 1, "--gpus-per-node", 2)
OLD_TEMPLATE = "OLD {% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"

LOADS = """
import json, sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

def losses(kind, directory, base, records):
    tokens = AutoTokenizer.from_pretrained(directory)
    loads = AutoModelForCausalLM if kind == "sft" else AutoModelForSequenceClassification
    model = loads.from_pretrained(base or directory, dtype="auto")
    assert {p.dtype for p in model.parameters()} == {getattr(torch, str(model.config.dtype).removeprefix("torch."))}
    model = (PeftModel.from_pretrained(model, directory) if base else model).float().eval()
    def run(text):
        end = [] if kind == "classify" else [tokens.eos_token_id]
        ids = torch.tensor([tokens(text)["input_ids"] + end])
        return model(input_ids=ids, labels=ids if kind == "sft" else None), ids.numel() - 1
    for record in records:
        if kind == "sft":
            output, count = run(record["text"])
            yield float(output.loss), count
        elif kind == "classify":
            logits = run(record["text"])[0].logits
            label = model.config.label2id[record["label"]]
            yield float(torch.nn.functional.cross_entropy(logits, torch.tensor([label]))), 1
        else:
            better, worse = (run(record["prompt"] + record[side])[0].logits for side in ("chosen", "rejected"))
            yield float(-torch.nn.functional.logsigmoid(better - worse)), 1

results = []
for kind, directory, base, records in json.loads(sys.stdin.read()):
    with torch.no_grad():
        pairs = list(losses(kind, directory, base, records))
    template = AutoTokenizer.from_pretrained(directory).chat_template
    results.append((sum(loss * n for loss, n in pairs) / sum(n for _, n in pairs), template))
print("RESULTS", json.dumps(results))
"""


def checkpoint(folder: Path, config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(0)
    config.initializer_range = 0.15
    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(folder)
    train_demo_tokenizer(SIZES["vocab_size"], folder)
    (folder / "chat_template.jinja").write_text(OLD_TEMPLATE)
    return folder


def evaluations(output: Path) -> dict[int, float]:
    entries = map(json.loads, (output / "run" / "metrics.jsonl").read_text().splitlines())
    return {
        one["step"]: one["validation_metrics/loss"] for one in entries if "validation_metrics/loss" in one
    }


RUNS: dict[str, tuple[str, str, tuple[Any, ...]]] = {  # model, objective, options
    "full of a bf16 checkpoint": ("bf16", "sft", ()),
    "merged into a bf16 checkpoint": ("bf16", "sft", ATTENTION),
    "merged tied head": ("tied", "sft", (*LORA, "q_proj", "lm_head")),
    "merged tied embedding and head": ("tied", "sft", (*LORA, "embed_tokens", "lm_head")),
    "merged whole head": ("tied", "sft", ("--peft-config", "head.json")),
    "merged rows": ("tied", "sft", ("--peft-config", "rows.json")),
    "merged experts": ("mixture", "sft", (*LORA, "all-linear")),
    "classifier": ("llama", "classify", ()),
    "merged reward": ("llama", "reward", ATTENTION),
    "ranks in memory": ("llama", "sft", ()),
    "ranks in memory, merged tied head": ("tied", "sft", (*LORA, "q_proj", "lm_head")),
    "ranks in memory, merged experts": ("mixture", "sft", (*LORA, "all-linear", "--strategy", "zero1")),
}
if TorchVersion(torch.__version__) < "2.13":
    del RUNS["ranks in memory, merged experts"]  # rejected: tests/fcdp/test_trainer.py
FIRST = ("full of a bf16 checkpoint", "merged tied embedding and head", "merged reward")


@pytest.mark.parametrize("names", [
    pytest.param([name for name in RUNS if name in FIRST], id="first"),
    pytest.param([name for name in RUNS if name not in FIRST], id="others", marks=pytest.mark.slow),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_exports_evaluate_to_what_the_run_evaluated(
    names: list[str], finetune: Finetune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, config in PEFT.items():
        Path(name).write_text(json.dumps(config))
    models = {
        "llama": checkpoint(tmp_path / "llama", family_config("llama", **SIZES)),
        "bf16": checkpoint(tmp_path / "bf16", family_config("llama", **SIZES), torch.bfloat16),
        "tied": checkpoint(tmp_path / "tied", family_config("llama", **SIZES, tie_word_embeddings=True)),
        "mixture": checkpoint(tmp_path / "mixture", MixtralConfig(**MIXTURE, sliding_window=None)),
    }
    wanted, asked = {}, []
    for name in names:
        model, objective, options = RUNS[name]
        output = tmp_path / name.replace(" ", "-")
        records = PAIRS if objective == "reward" else TEXTS
        file = tmp_path / f"{objective}.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        data = (
            "--data",
            file,
            "--eval-data",
            file,
            "--objective",
            objective,
            "--seq-len",
            64,
            "--batch-size",
            2,
        )
        steps = ("--steps", 4, "--lr", "3e-3", "--save-every", 2, "--eval-every", 2, "--dtype", "fp32")
        steps = (*steps, "--chat-template", "zephyr")
        where = RANKS if name.startswith("ranks") else ALONE
        done = finetune("--model", models[model], *data, *steps, *where, *options, "--output", output)
        assert done.status == 0, (name, done.err)
        losses = evaluations(output)
        best = json.loads((output / "checkpoints/best/evaluation.json").read_text())
        assert best["loss"] == losses[best["step"]] and abs(losses[4] - losses[0]) > 1e-2
        base: Path | None = None
        if {"--lora-rank", "--peft-config"} & set(options):
            base = models[model] if objective == "sft" else output / "base"
        saved = {"": 4, "checkpoints/step-2": 2, "checkpoints/best": best["step"]}
        for folder, step in saved.items():
            wanted[f"{name}: {folder}"] = losses[step]
            asked.append((objective, str(output / folder), None if base is None else str(base), records))
        if "merged" in name:
            assert f"to merge finetune export --model {base} --adapter {output} --output DIR" in done.out
            merge = (
                "export",
                "--model",
                base,
                "--adapter",
                output,
                "--output",
                f"{output}-merged",
                "--dtype",
                "fp32",
            )
            assert finetune(*merge).status == 0
            wanted[f"{name}: merged"] = losses[4]
            asked.append((objective, f"{output}-merged", None, records))
        if objective != "sft":
            assert not (output / "base" / "chat_template.jinja").read_text().startswith("OLD")
    done = subprocess.run(
        [sys.executable, "-c", LOADS], input=json.dumps(asked), capture_output=True, text=True
    )
    assert "RESULTS " in done.stdout, done.stderr[-3000:]
    results = json.loads(done.stdout.partition("RESULTS ")[2])
    assert [
        (name, loss, wanted[name])
        for name, (loss, _) in zip(wanted, results, strict=True)
        if loss != pytest.approx(wanted[name], rel=2e-5)
    ] == []
    zephyr = {template for _, template in results}
    assert len(zephyr) == 1 and "OLD" not in str(zephyr)
