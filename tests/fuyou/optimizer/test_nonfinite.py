"""A step whose loss or gradient is not finite stops training, and leaves no trace."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import fuyou
from fuyou.optimizer.nonfinite import NonFiniteLoss, check_finite
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
        model,
        ssd=[ssd],
        host_memory="600MiB",
        micro_batch=1,
        batch_shape=(2, SEQ_LEN),
        dtype="fp32",
        **options,
    )


def train(engine: fuyou.Engine, numbers: Sequence[int], bad: Sequence[int] = ()) -> list[float]:
    """Batch and learning rate of each step are those of its number."""
    losses = []
    for number in numbers:
        engine.lr = 1e-2 / number
        engine(**batch(number, number in bad)).loss.backward()
        losses.append(engine.step().loss)
    return losses


@pytest.mark.parametrize("options", [
    {}, {"max_grad_norm": 0.5, "clip_by": "speculation"}, {"commit_every": 2},
    pytest.param({"max_grad_norm": 0.5, "host_cache": 0}, marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_a_step_that_is_not_finite_leaves_no_trace(
    poisoned: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    with engine_of(poisoned, tmp_path / "without", **options) as engine:
        losses = train(engine, (1, 2, 3, 4))
        engine.flush()
        expected = digests(engine)
    with engine_of(poisoned, tmp_path / "with", **options) as engine:
        assert train(engine, (1, 2, 3)) == losses[:3]
        engine.flush()
        with pytest.raises(
            NonFiniteLoss, match=r"The loss of step 4 is nan\. Training stops; step 3 is committed"
        ):
            train(engine, (4,), bad=(4,))
    with engine_of(poisoned, tmp_path / "with", resume=True, **options) as engine:
        assert engine.step_count == 3
        assert train(engine, (4,)) == losses[3:]
        engine.flush()
        assert digests(engine) == expected


def test_what_is_not_finite() -> None:
    check_finite(1, 2.0, 1.0, 0)
    with pytest.raises(NonFiniteLoss, match="The gradient norm of step 12 is inf") as caught:
        check_finite(12, 1.0, float("inf"), 11)
    assert (caught.value.step, caught.value.committed) == (12, 11)
    with pytest.raises(NonFiniteLoss, match="The loss of step 1 is -inf"):
        check_finite(1, float("-inf"), float("nan"), 0)
