"""Learning rates against the schedules of transformers, and warm-up as people type it."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from cli.options.schedule import SCHEDULES, LearningRate, Warmup
from common.errors import UserError


@pytest.mark.parametrize(("schedule", "twin"), [
    ("cosine", get_cosine_schedule_with_warmup), ("linear", get_linear_schedule_with_warmup),
    ("constant", lambda optimizer, warmup, total: get_constant_schedule_with_warmup(optimizer, warmup)),
])  # fmt: skip
@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (0, 7), (3, 10), (1, 100), (5, 6)])
def test_falls_as_transformers_schedules_do(schedule: str, twin, warmup: int, total: int) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    scheduler = twin(optimizer, warmup, total)
    rate = LearningRate(schedule, 0.3, warmup, total)
    for step in range(1, total + 1):
        expected = scheduler.get_last_lr()[0]
        assert rate.at(step) == pytest.approx(expected, abs=1e-12)
        optimizer.step()
        scheduler.step()


@given(st.sampled_from(SCHEDULES), st.integers(1, 500), st.data())
def test_rises_from_zero_then_never_rises_again(schedule: str, total: int, data: st.DataObject) -> None:
    warmup = data.draw(st.integers(0, total))
    rate = LearningRate(schedule, 1.0, warmup, total)
    rates = [rate.at(step) for step in range(1, total + 1)]
    assert all(0 < value <= 1 for value in rates[bool(warmup) :])
    assert warmup == total or max(rates) == rates[warmup] == 1
    assert not warmup or rates[0] == 0
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    if schedule == "constant":
        assert set(rates[warmup:]) <= {1.0}


@pytest.mark.parametrize(("text", "total", "steps"), [
    ("0", 10, 0), ("7", 10, 7), ("10", 10, 10), ("0.1", 10, 1), ("0.03", 100, 3), ("3%", 100, 3), ("5%", 10, 1),
    ("0.0", 10, 0), ("100%", 4, 4),
])  # fmt: skip
def test_warmup_is_steps_or_a_part_of_them(text: str, total: int, steps: int) -> None:
    assert Warmup.parse(text).steps(total) == steps


@pytest.mark.parametrize("text", ["-1", "1.5", "200%", "nan", "soon", ""])
def test_warmup_rejects(text: str) -> None:
    with pytest.raises(UserError, match="neither a number of steps"):
        Warmup.parse(text)


@given(
    st.sampled_from(["1", "3%", "0.001", "100%", "5", "0"]), st.integers(1, 50), st.sampled_from(SCHEDULES)
)
def test_a_run_that_is_accepted_learns_something(text: str, total: int, schedule: str) -> None:
    assume(total > 1 or text == "0")
    assume(total >= 5 or text != "5")
    warmup = Warmup.parse(text).steps(total)
    assert any(LearningRate(schedule, 1.0, warmup, total).at(step) for step in range(1, total + 1))


def test_a_single_step_of_warmup_is_rejected() -> None:
    for text in ("3%", "1", "100%"):
        with pytest.raises(UserError, match=r"The only step .* has the learning rate 0"):
            Warmup.parse(text).steps(1)


def test_warmup_longer_than_the_run() -> None:
    with pytest.raises(UserError, match="warmup 11 is longer than the whole run of 10 steps"):
        Warmup.parse("11").steps(10)
