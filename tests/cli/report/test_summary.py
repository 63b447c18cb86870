"""The summary of a run, the metrics of a step, and their files."""

import contextlib
import json
import os
import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from cli.options.loss_sum import EVALUATION
from cli.report.log import History, spans
from cli.report.page import read_metrics
from cli.report.results import StepResult, Summary, Usage, step_metrics
from common.store.errors import StoreError

USAGE = Usage(1 << 30, 2 << 30, 4 << 30, 1 << 30, (2700, 10**12), 10**12)


def test_a_summary_adds_up_steps() -> None:
    summary = Summary(tokens=100, flops_per_token=6e9)
    summary.add(StepResult(3.0, 1.0, busy_seconds={"gpu": 1.0, "ssd": 1.5}), 2.0, (1000, 2000))
    busy = {"gpu": 1.0, "ssd": 2.5}
    summary.add(StepResult(2.0, 1.0, clipped=True, updated_again=True, busy_seconds=busy), 3.0, (1000, 1000))
    summary.add_moved((48, 1096))
    text = summary.text(USAGE, "speculation", past_host=True)
    for words in (
        "3.0000 in the first step, 2.0000 in the last of 2", "40 tokens/s, 0.24 TFLOP/s", "5.0 s, 2.5 s per step",
        "bound by the SSDs (80% of the time)", "4 GiB of host memory (3 GiB more than before the model), 1 GiB of",
        "1 KiB read and 2 KiB written per step; 1.82 TiB written in all; parameters to the device past host memory",
        "by speculation: 1 of 2 steps clipped, 1 of them updated again",
    ):  # fmt: skip
        assert words in text, text
    assert "network" not in text and "past host" not in summary.text(USAGE, None, past_host=False)


def test_a_line_has_what_people_look_at_and_metrics_have_torchtitans_names() -> None:
    result = StepResult(1.5, 123.456, aux_loss=2.0, sent_bytes=3 << 30, watched={"accuracy": 0.5})
    assert str(result) == "loss 1.5000 (router 2.0000), accuracy 50.0%, norm 123"
    usage = Usage(5 << 30, 7 << 30, 8 << 30, 0)
    assert result.learned(7, 1e-3, 1600) | step_metrics(result, 2.0, 200.0, 1e12, usage, (0, 0)) == {
        "loss_metrics/global_avg_loss": 1.5, "loss_metrics/aux_loss": 2.0, "accuracy": 0.5, "grad_norm": 123.456,
        "lr": 1e-3, "n_tokens_seen": 11200, "throughput(tps)": 200.0, "tflops": 1.0,
        "time_metrics/end_to_end(s)": 2.0, "memory/max_active(GiB)": 5.0, "memory/host(GiB)": 7.0,
        "network/sent(GiB)": 3.0,
    }  # fmt: skip


def test_a_full_file_system_is_reported_with_the_file(tmp_path: Path) -> None:
    with contextlib.closing(History(tmp_path / "losses.jsonl", 0)) as history:
        before, history._file = history._file, Path("/dev/full").open("a", buffering=1)  # noqa: SIM115
        with pytest.raises(
            StoreError, match=f"writing of losses.jsonl in {tmp_path} failed: No space left on device"
        ):
            history.append(1, {"loss": 0.5})
        history._file = before


def test_lines_are_on_the_drive_before_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, durable, fsync = tmp_path / "losses.jsonl", [], os.fsync

    def noted(descriptor: int) -> None:
        durable.append(os.fstat(descriptor).st_size)
        fsync(descriptor)

    with contextlib.closing(History(file, 0)) as history:
        monkeypatch.setattr(os, "fsync", noted)
        for step in (1, 2):
            history.append(step, {"loss": 0.5})
            assert durable[-1] == file.stat().st_size == step * len('{"step": 1, "loss": 0.5}\n')


def test_what_is_not_finite_has_no_number(tmp_path: Path) -> None:
    with contextlib.closing(History(tmp_path / "losses.jsonl", 0)) as history:
        history.append(2, {"loss": float("nan"), "grad_norm": float("inf"), "lr": 1e-3})
    line = json.loads((tmp_path / "losses.jsonl").read_text(), parse_constant=pytest.fail)
    assert line == {"step": 2, "loss": None, "grad_norm": None, "lr": 1e-3}


def test_a_damaged_line_goes_and_the_others_stay(tmp_path: Path) -> None:
    file = tmp_path / "losses.jsonl"
    good = b'{"step": 1, "loss": 2.0}\n'
    file.write_bytes(good + b'{"step": \xff}\n' + b"[" * 100_000 + b'\n{"step": 9}\n{"st')
    History(file, 3).close()
    assert file.read_bytes() == good


@pytest.mark.parametrize("seed", range(20))
def test_each_step_is_in_the_file_once_however_often_its_run_was_killed(seed: int, tmp_path: Path) -> None:
    """Killed runs leave lines after their last commit, and one that was cut off; held-out data may change."""
    numbers, steps = random.Random(seed), 12

    def take(file: Path, committed: int, last: int, changed: bool) -> None:
        with contextlib.closing(History(file, committed)) as history:
            if changed and committed:
                history.append(committed, {EVALUATION: 0.5})
            for step in range(committed + 1, last + 1):
                history.append(step, {"loss": step / 2})
                history.append(step, {EVALUATION: 0.5})

    take(tmp_path / "whole", 0, steps, changed=False)
    file, committed = tmp_path / "killed", 0
    while committed < steps:
        last = numbers.randint(committed, steps)
        take(file, committed, last, numbers.random() < 0.5)
        assert read_metrics(file) == read_metrics(tmp_path / "whole")[: 2 * last]
        with file.open("a") as lines:
            lines.write('{"step": 1' if numbers.random() < 0.5 else "")
        committed = numbers.randint(committed, last)
    take(file, steps, steps, changed=False)
    assert file.read_text() == (tmp_path / "whole").read_text()


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([], ""),
        ([1], "step 1"),
        ([1, 2], "steps 1 to 2"),
        ([2, 3, 7], "steps 2 to 3, 7"),
        (range(1, 15, 2), "steps 1, 3, 5, 7, 9 and 2 more series"),
        (range(3, 1501), "steps 3 to 1,500"),
    ],
)
def test_steps_in_words(steps: Iterable[int], words: str) -> None:
    assert spans(steps) == words
