"""Sequence and token classifiers train as they do in memory, and are exported with their heads."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaConfig,
    PreTrainedModel,
    Qwen3Config,
)

import fuyou
from common.errors import UserError
from tests.helpers.classifiers import SIZES, batch

CASES = {
    "sequence": (AutoModelForSequenceClassification, LlamaConfig(**SIZES)),
    "token": (AutoModelForTokenClassification, Qwen3Config(**SIZES, head_dim=8, classifier_dropout=0.0)),
}


def in_memory(model: PreTrainedModel, batches: list[dict[str, torch.Tensor]]) -> list[float]:
    """Losses of steps with the whole batch at once, and the model's own loss."""
    decayed = [p for n, p in model.named_parameters() if p.dim() > 1]
    rest = [p for n, p in model.named_parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    losses = []
    for one in batches:
        loss = model(**one, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("case", CASES)
def test_losses_weights_and_export_are_those_of_memory(case: str, tmp_path: Path) -> None:
    auto, config = CASES[case]
    torch.manual_seed(0)
    auto.from_config(config).save_pretrained(tmp_path / "model")
    batches = [batch(case, seed) for seed in range(3)]
    model = auto.from_pretrained(tmp_path / "model").train()
    expected = in_memory(model, batches)
    (tmp_path / "ssd").mkdir()
    with fuyou.Engine(
        tmp_path / "model", ssd=[tmp_path / "ssd"], dtype="fp32", lr=1e-3, weight_decay=0.1, micro_batch=2,
        host_memory="600MiB",
    ) as engine:  # fmt: skip
        for one, loss in zip(batches, expected, strict=True):
            assert engine.eval_loss(**one) == pytest.approx(loss, abs=1e-6)
            out = engine(**one)
            out.loss.backward()
            engine.step()
            assert out.loss.item() == pytest.approx(loss, abs=1e-6)
        wrong = {**batches[0], "labels": torch.zeros(3, 16) if case == "sequence" else torch.zeros(3).long()}
        with pytest.raises(UserError, match="A batch needs labels, a tensor of integers"):
            engine(**wrong)
        engine.save_pretrained(tmp_path / "tuned")
    tuned = load_file(tmp_path / "tuned" / "model.safetensors")
    assert tuned.keys() == load_file(tmp_path / "model" / "model.safetensors").keys()
    loaded = auto.from_pretrained(tmp_path / "tuned")
    for (name, value), other in zip(loaded.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(value, other, rtol=0, atol=1e-5, msg=name)
        assert not torch.equal(value, torch.zeros_like(value))


def test_the_command_rejects_a_classifier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from cli.main import main

    AutoModelForSequenceClassification.from_config(CASES["sequence"][1]).save_pretrained(tmp_path / "model")
    assert (
        main(["--model", str(tmp_path / "model"), "--data", "random", "--output", str(tmp_path / "out")]) != 0
    )
    assert (
        "is a sequence classifier, and --objective sft trains models that write text"
        in capsys.readouterr().err
    )
