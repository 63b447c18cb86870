"""Packed rows train as their documents do one by one in memory; labels as the family's own loss takes them."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer

import fuyou
from common.errors import UserError
from tests.helpers.models.small_models import model_of

ROWS, TOKENS, STEPS = 2, 31, 2
DOCUMENTS = ([9, 17, 5], [20, 11])
OPTIONS = {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-3}


def batches() -> list[dict[str, torch.Tensor]]:
    """Packed rows, in which the first token of a document has no label."""
    generator = torch.Generator().manual_seed(5)
    result = []
    for _ in range(STEPS):
        ids = torch.randint(5, 80, (ROWS, TOKENS), generator=generator)
        positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in DOCUMENTS])
        result.append(
            {"input_ids": ids, "labels": ids.masked_fill(positions == 0, -100), "position_ids": positions}
        )
    return result


def saved(family: str, directory: Path) -> Path:
    model_of(family).save_pretrained(directory)
    return directory


def engine(model: Path, ssd: Path) -> fuyou.Engine:
    ssd.mkdir()
    options = {
        "host_memory": "1GiB",
        "host_cache": 0,
        "micro_batch": 1,
        "batch_shape": (ROWS, TOKENS),
        **OPTIONS,
    }
    return fuyou.Engine(model, ssd=[ssd], dtype="fp32", **options)


class OneByOne:
    """A plain loop in memory, a document at a time."""

    def __init__(self, checkpoint: Path):
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32
        ).train()
        decays = {True: [], False: []}
        for name, parameter in self.model.named_parameters():
            decays[name in Trainer.get_decay_parameter_names(None, self.model)].append(parameter)
        groups = [{"params": decays[True], "weight_decay": OPTIONS["weight_decay"]},
                  {"params": decays[False], "weight_decay": 0.0}]  # fmt: skip
        self.optimizer = torch.optim.AdamW(groups, lr=OPTIONS["lr"], eps=OPTIONS["eps"])

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        items, total = int((batch["labels"] != -100).sum()), 0.0
        for row, lengths in enumerate(DOCUMENTS):
            start = 0
            for length in lengths:
                part = {
                    name: batch[name][row : row + 1, start : start + length]
                    for name in ("input_ids", "labels")
                }
                loss = self.model(**part, use_cache=False).loss * ((length - 1) / items)
                loss.backward()
                total += loss.item()
                start += length
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


@pytest.mark.parametrize(
    "family",
    ["gemma3_text", "gpt_oss", "jamba",
     *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "lfm2_moe", "llama", "mamba2", "qwen3_next"))],
)  # fmt: skip
def test_packed_rows_train_as_their_documents_alone(family: str, tmp_path: Path) -> None:
    checkpoint = saved(family, tmp_path / "model")
    twin = OneByOne(checkpoint)
    with engine(checkpoint, tmp_path / "ssd") as trained:
        for batch in batches():
            loss = trained(**batch).loss
            loss.backward()
            trained.step()
            assert loss.item() == pytest.approx(twin.step(batch), abs=3e-6)
        expected = dict(twin.model.named_parameters())
        for name, value in trained.named_parameters():
            torch.testing.assert_close(
                value, expected[name].detach(), rtol=0, atol=1e-5, msg=lambda m, n=name: n + m
            )


def test_a_family_that_cannot_be_packed_is_reported_and_takes_rows_of_one_document(tmp_path: Path) -> None:
    checkpoint, batch = saved("mpt", tmp_path / "model"), batches()[0]
    with engine(checkpoint, tmp_path / "ssd") as trained:
        with pytest.raises(UserError, match="MptForCausalLM: they would see each other"):
            trained(**batch)
        with pytest.raises(UserError, match="they would see each other"):
            trained.eval_loss(**batch)
        batch["position_ids"] = torch.arange(TOKENS).expand(ROWS, -1)
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        own = model(input_ids=batch["input_ids"], labels=batch["labels"], use_cache=False).loss
        loss = trained(**batch).loss
        assert loss.item() == pytest.approx(own.item(), abs=1e-6)
        loss.backward()
        assert trained.step().step == 1


def test_restarting_positions_and_a_mask_of_padding_do_not_go_together(tmp_path: Path) -> None:
    batch = batches()[0]
    both = {**batch, "attention_mask": torch.ones(ROWS, TOKENS, dtype=torch.long)}
    with (
        engine(saved("llama", tmp_path / "model"), tmp_path / "ssd") as trained,
        pytest.raises(UserError, match="Leave attention_mask out"),
    ):
        trained(**both)


def test_barts_loss_does_not_shift_labels(tmp_path: Path) -> None:
    checkpoint, batch = saved("bart", tmp_path / "model"), batches()[0]
    del batch["position_ids"]
    model = AutoModelForCausalLM.from_pretrained(checkpoint).train()
    with engine(checkpoint, tmp_path / "ssd") as trained:
        for _ in range(2):
            own = model(**batch, use_cache=False).loss
            assert trained.eval_loss(**batch) == pytest.approx(own.item(), abs=1e-6)
        own.backward()
        loss = trained(**batch).loss
        assert loss.item() == pytest.approx(own.item(), abs=1e-6)
        loss.backward()
        norm = (
            torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None])
            .sum()
            .sqrt()
        )
        assert trained.step().grad_norm == pytest.approx(norm.item(), rel=1e-5)
