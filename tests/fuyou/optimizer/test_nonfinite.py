"""Steps whose loss or gradient is not finite: skipped, the run is the one that never saw their batches."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import fuyou
from common.errors import UserError
from fuyou.optimizer.nonfinite import MOST_IN_A_ROW, NonFiniteLoss, NonFinitePolicy
from tests.helpers.crash.runs import SEQ_LEN, VOCABULARY, digests, tiny_config

POISON = 7
"""A token whose embedding is infinite."""


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("poisoned")
    torch.manual_seed(1)
    model = LlamaForCausalLM(tiny_config())
    with torch.no_grad():
        model.model.embed_tokens.weight[POISON] = torch.inf
    model.save_pretrained(directory)
    return directory


def batch(number: int, bad: bool = False) -> dict[str, torch.Tensor]:
    ids = torch.randint(POISON + 1, VOCABULARY, (2, SEQ_LEN), generator=torch.Generator().manual_seed(number))
    ids[1, 3] = POISON if bad else ids[1, 3]
    return {"input_ids": ids, "labels": ids}


def engine_of(model: Path, ssd: Path, **options: Any) -> fuyou.Engine:
    ssd.mkdir(exist_ok=True)
    return fuyou.Engine(
        model, ssd=[ssd], host_memory="600MiB", micro_batch=1, batch_shape=(2, SEQ_LEN), dtype="fp32", **options
    )


def train(engine: fuyou.Engine, numbers: Sequence[int], bad: Sequence[int] = ()) -> list[fuyou.StepReport]:
    """Batch and learning rate of each step are those of its number."""
    reports = []
    for number in numbers:
        engine.lr = 1e-2 / number
        engine(**batch(number, number in bad)).loss.backward()
        reports.append(engine.step())
    return reports


@pytest.mark.parametrize("options", [
    pytest.param({"max_grad_norm": 0.5, "host_cache": 0}, marks=pytest.mark.slow),
    {"max_grad_norm": 0.5, "clip_by": "speculation"}, {"commit_every": 2},
], ids=str)  # fmt: skip
def test_a_skipped_step_leaves_no_trace(poisoned: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    with engine_of(poisoned, tmp_path / "without", **options) as engine:
        expected = [report.loss for report in train(engine, (1, 4, 6))]
        engine.flush()
        wanted = digests(engine)
        with pytest.raises(NonFiniteLoss, match=r"The loss of step 4 is nan\. Training stops; step 3 is committed"):
            train(engine, (7,), bad=(7,))
    with engine_of(poisoned, tmp_path / "with", on_nonfinite="skip", **options) as engine:
        reports = train(engine, (1, 2, 3), bad=(2, 3))
        assert [report.skipped for report in reports] == [False, True, True]
        assert not any(report.loss < 100 for report in reports[1:])
        engine.flush()
    with engine_of(poisoned, tmp_path / "with", on_nonfinite="skip", resume=True, **options) as engine:
        assert engine.step_count == 3
        reports += train(engine, (4, 5, 6), bad=(5,))
        engine.flush()
        assert engine.step_count == engine.committed_step == 6
        assert digests(engine) == wanted
    assert [report.loss for report in reports if not report.skipped] == expected


def test_policy() -> None:
    with pytest.raises(UserError, match="Did you mean 'skip'"):
        NonFinitePolicy("skipp")
    policy = NonFinitePolicy("skip", skipped=3)
    inf, nan = float("inf"), float("nan")
    assert not policy.should_skip_step(1, 2.0, 1.0, 0)
    for step in range(MOST_IN_A_ROW):
        assert policy.should_skip_step(step, *((nan, 1.0), (1.0, inf), (-inf, nan))[step % 3], 0)
    assert policy.skipped == 3 + MOST_IN_A_ROW
    with pytest.raises(NonFiniteLoss, match="The gradient norm of step 12 is inf, after 10 steps in a row that were"):
        policy.should_skip_step(12, 1.0, inf, 11)
    assert not policy.should_skip_step(12, 1.0, 1.0, 11), "a finite one begins a new row"
    assert policy.should_skip_step(13, nan, 1.0, 12)
