"""A document's numbers do not depend on what shares its row, its micro-batch, its batch, or the run's ranks.

The twin computes each document alone with transformers, and adds up.
"""

import contextlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, MixtralConfig, PreTrainedConfig
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import fuyou
from cli.train.loop import evaluate
from cli.train.objectives import ObjectiveLoop
from common.data import DataConfig, open_data
from common.data.examples import pair_kind
from fuyou.objectives.losses import PairObjective
from tests.cli.conftest import Finetune
from tests.helpers.command.histories import history
from tests.helpers.models.small_checkpoints import SIZES, small_checkpoint

WORDS = ["the", "module", "provides", "a", "function", "that", "returns", "the", "number", "of", "rows"]
TEXTS = [
    " ".join(WORDS[(i + n) % len(WORDS)] for n in range(length))
    for i, length in enumerate((3, 9, 14, 5, 12, 7))
]
PAIRS = [{"prompt": f"{i} is", "chosen": f" {text}.", "rejected": " not."} for i, text in enumerate(TEXTS)]
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "longrope": {
        "rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [3.0] * 8,
        "original_max_position_embeddings": 24,
    },
}  # fmt: skip
SLOW = pytest.mark.slow
ALONE = ("--gpu", "cpu", "--host-memory", "600MiB")
RANKS = ("--nodes", 1, "--gpus-per-node", 2)


def mixture(rope: str) -> PreTrainedConfig:
    sizes = {**SIZES, "max_position_embeddings": 512, "head_dim": 16}
    return MixtralConfig(
        **sizes, num_local_experts=4, num_experts_per_tok=2, sliding_window=None, output_router_logits=True,
        router_aux_loss_coef=0.5, initializer_range=0.3, rope_parameters={"rope_theta": 1e4, **ROPES[rope]},
    )  # fmt: skip


def alone(checkpoint: Path, texts: list[str]) -> tuple[float, float, float]:
    """Return mean cross entropy, loss, and gradient norm of all documents, each of them computed alone."""
    tokens: Any = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    losses, count, routers = [], 0, []
    for text in texts:
        ids = torch.tensor([[*tokens(text)["input_ids"], tokens.eos_token_id]])
        output = model(input_ids=ids, output_router_logits=True)
        losses.append(functional.cross_entropy(output.logits[0, :-1], ids[0, 1:], reduction="sum"))
        routers.append(output.router_logits)
        count += ids.numel() - 1
    config, loss = model.config, torch.stack(losses).sum() / count
    layers = tuple(torch.cat(layer) for layer in zip(*routers, strict=True))
    aux = load_balancing_loss_func(layers, config.num_local_experts, config.num_experts_per_tok)
    whole = loss + config.router_aux_loss_coef * aux
    whole.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None))
    return loss.item(), whole.item(), norm


class Case:
    """Runs the command on the same documents in several ways."""

    def __init__(self, finetune: Finetune, checkpoint: Path, folder: Path, *common: Any) -> None:
        self._finetune, self._folder = finetune, folder
        (folder / "ssd").mkdir()
        self._common = ("--model", checkpoint, "--dtype", "fp32", "--schedule", "constant", *common)
        self._common = (*self._common, "--lr", "1e-3", "--steps", 2)
        self._runs = 0

    def run(self, *options: Any) -> tuple[list[float], list[float], list[float], dict[str, torch.Tensor]]:
        """Return losses, norms, and evaluations of two steps, and the weights after them."""
        self._runs += 1
        output = self._folder / f"run-{self._runs}"
        done = self._finetune(*self._common, *options, "--output", output)
        assert done.status == 0, done.err
        logged = history(output)
        entries = map(json.loads, (output / "run" / "metrics.jsonl").read_text().splitlines())
        name = "validation_metrics/loss"
        evaluations = [entry[name] for entry in entries if name in entry]
        weights = load_file(output / "model.safetensors")
        return [one["loss"] for one in logged], [one["grad_norm"] for one in logged], evaluations, weights


def assert_same(result: Any, expected: Any) -> None:
    for values, others in zip(result[:3], expected[:3], strict=True):
        assert values == pytest.approx(others, rel=2e-5)
    for name, value in expected[3].items():
        torch.testing.assert_close(result[3][name], value, rtol=1e-4, atol=3e-5)


def written(folder: Path, records: list[Any]) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / "records.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def rows(checkpoint: Path, file: Path, seq_len: int, folder: Path) -> int:
    """Return the number of rows into which the documents are packed."""
    data = open_data(
        DataConfig((str(file),), seq_len, 1), AutoTokenizer.from_pretrained(checkpoint), folder / "cache"
    )
    assert "cut" not in data.description
    return data.rows


@pytest.mark.parametrize("rope", ["longrope", pytest.param("default", marks=SLOW)])
def test_a_mixture_with_a_router_loss(rope: str, finetune: Finetune, tmp_path: Path) -> None:
    checkpoint = small_checkpoint(tmp_path / "model", mixture(rope))
    file = written(tmp_path / "data", [{"text": text} for text in TEXTS])
    case = Case(finetune, checkpoint, tmp_path, "--data", file, "--eval-data", file, "--eval-every", 1)
    ways: list[tuple[Any, ...]] = [(64, *ALONE, "--micro-batch", 1), (256, *ALONE)]
    if rope != "longrope":
        ways += [(64, *RANKS, "--micro-batch", 1), (64, *RANKS, "--ssd", tmp_path / "ssd")]
    cross_entropy, loss, norm = alone(checkpoint, TEXTS)
    results = []
    for seq_len, *options in ways:
        size = rows(checkpoint, file, seq_len, tmp_path)
        results.append(case.run("--seq-len", seq_len, "--batch-size", size, *options))
    for result in results:
        assert (result[0][0], result[1][0], result[2][0]) == pytest.approx(
            (loss, norm, cross_entropy), rel=2e-5
        )
        assert_same(result, results[0])


OBJECTIVES: dict[str, list[Any]] = {
    "dpo": PAIRS,
    "reward": PAIRS,
    "classify": [{"text": text, "label": ("odd", "even")[i % 2]} for i, text in enumerate(TEXTS)],
}


@pytest.mark.parametrize(
    "objective", ["dpo", *(pytest.param(name, marks=SLOW) for name in ("reward", "classify"))]
)
def test_every_objective(objective: str, finetune: Finetune, tmp_path: Path) -> None:
    config = mixture("longrope")
    if objective in ("reward", "classify"):
        config = LlamaConfig(
            **{**SIZES, "max_position_embeddings": 512}, rope_parameters=config.rope_parameters
        )
    checkpoint = small_checkpoint(tmp_path / "model", config)
    file = written(tmp_path / "data", OBJECTIVES[objective])
    case = Case(finetune, checkpoint, tmp_path, "--data", file, "--eval-data", file, "--objective", objective)
    whole = case.run(*ALONE, "--seq-len", 64, "--batch-size", 6)
    assert_same(case.run(*ALONE, "--seq-len", 128, "--batch-size", 6, "--micro-batch", 2), whole)
    assert_same(case.run(*RANKS, "--ssd", tmp_path / "ssd", "--seq-len", 64, "--batch-size", 6), whole)
    smaller = case.run(*ALONE, "--seq-len", 64, "--batch-size", 4)
    assert smaller[2][0] == pytest.approx(whole[2][0], rel=2e-5)
    if objective == "dpo":
        texts = [pair["prompt"] + pair[side] for pair in PAIRS for side in ("chosen", "rejected")]
        cross_entropy, loss, _ = alone(checkpoint, texts)
        assert whole[0][0] == pytest.approx(math.log(2) + loss - cross_entropy, rel=2e-5)


FIXED = -30.0  # log-probability of every answer under the reference


def evaluated(
    engine: fuyou.Engine, checkpoint: Path, objective: str, file: Path, config: DataConfig
) -> float:
    """Return the loss of all records as the command evaluates it."""
    tokenizer, cache = AutoTokenizer.from_pretrained(checkpoint), file.parent / "cache"
    if objective == "sft":
        with contextlib.closing(open_data(config, tokenizer, cache)) as data:
            assert "cut" not in data.description
            return evaluate(data, config.batch_size, lambda batch: engine.eval_loss(**batch)).loss
    with contextlib.closing(open_data(replace(config, kind=pair_kind()), tokenizer, cache)) as items:
        assert "cut" not in items.description
        items.reference = np.full(2 * items.rows, FIXED, dtype=np.float32)
        return ObjectiveLoop(PairObjective(), engine).evaluate(items, config.batch_size).loss


LENGTHS = st.integers(1, 6)
