"""What happens when something dies: nobody hangs, nothing is left behind, the last committed step is intact."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import torch

import fuyou
from common.errors import FinetuneError, UserError
from fuyou.compute import StepComputation
from fuyou.tasks import Task
from tests.fuyou.twin import tiny_configs

BATCH = {"input_ids": torch.arange(64).view(2, 32), "labels": torch.arange(64).view(2, 32)}


def small_engine(path: Path, **options) -> fuyou.Engine:
    return fuyou.Engine(
        tiny_configs()["llama"], ssd=[path], host_memory="600MiB", batch_shape=(2, 32), micro_batch=1, **options
    )


def train(engine: fuyou.Engine, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        out = engine(**BATCH)
        out.loss.backward()
        engine.step()
        losses.append(out.loss.item())
    return losses


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[float | None, list[float]]:
    """Losses of four steps in which nothing happens, by the norm that gradients are clipped to."""
    losses = {}
    for clip in (None, 0.5):
        with small_engine(tmp_path_factory.mktemp("undisturbed"), lr=1e-3, max_grad_norm=clip) as engine:
            losses[clip] = train(engine, 4)
    return losses


def test_death_of_the_optimizer_process_is_noticed_and_survived(
    tmp_path: Path, undisturbed: dict[float | None, list[float]]
) -> None:
    expected = undisturbed[None]
    engine = small_engine(tmp_path, lr=1e-3)
    assert train(engine, 2) == expected[:2]
    engine.flush()
    child = engine._pids()[1]
    os.kill(child, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(FinetuneError, match="optimizer process was killed"):
        train(engine, 2)
    engine.close()
    assert time.monotonic() - began < 50  # one that says nothing would be waited for for a minute
    assert not psutil.pid_exists(child)
    with small_engine(tmp_path, lr=1e-3, resume=True) as engine:
        assert engine.step_count == 2
        assert train(engine, 2) == expected[2:]


def test_death_of_the_engine_ends_the_optimizer_process(tmp_path: Path) -> None:
    script = textwrap.dedent(f"""
        import sys, os, signal
        from pathlib import Path
        from tests.fuyou.test_failures import small_engine, train
        engine = small_engine(Path({str(tmp_path)!r}))
        train(engine, 1)
        engine.flush()
        print(engine._pids()[1], flush=True)
        train(engine, 1000000)
    """)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 60
    while psutil.pid_exists(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(child)
    with small_engine(tmp_path, resume=True) as engine:
        assert engine.step_count >= 1


def test_infinite_loss_stops_with_the_last_step_intact(tmp_path: Path) -> None:
    with small_engine(tmp_path, lr=1e-3) as engine:
        train(engine, 1)
        engine.lr = 1e30
        with pytest.raises(fuyou.NonFiniteLoss, match="step") as caught:
            train(engine, 3)
        assert caught.value.committed == caught.value.step - 1
    with small_engine(tmp_path, resume=True) as engine:
        assert engine.step_count == caught.value.committed


def test_misuse_is_told(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        with pytest.raises(FinetuneError, match="comes after"):
            engine.step()
        with pytest.raises(UserError, match="labels"):
            engine(input_ids=BATCH["input_ids"], labels=None)
        nothing = torch.full((2, 32), -100)
        with pytest.raises(UserError, match="No token"):
            engine(input_ids=BATCH["input_ids"], labels=nothing)
        out = engine(**BATCH)
        with pytest.raises(FinetuneError, match="again before"):
            engine(**BATCH)
        with pytest.raises(FinetuneError, match="scale the learning rate"):
            (out.loss * 2).backward()


def test_a_store_is_not_overwritten_and_not_mistaken(tmp_path: Path) -> None:
    small_engine(tmp_path, dtype="bf16").close()
    with pytest.raises(UserError, match="--resume"):
        small_engine(tmp_path)
    with pytest.raises(UserError, match="--dtype"):
        small_engine(tmp_path, resume=True, dtype="fp32")
    with pytest.raises(UserError, match="--model"):
        fuyou.Engine(tiny_configs()["gpt2"], ssd=[tmp_path], host_memory="600MiB", resume=True)
    small_engine(tmp_path, overwrite=True).close()


def test_budgets_that_are_too_small_say_what_would_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--host-memory of at least (\d+)MiB") as caught:
        fuyou.Engine("llama-10m", ssd=[tmp_path], host_memory="64MiB", batch_shape=(1, 64))
    enough = str(caught.value).partition("--host-memory of at least ")[2].partition(" ")[0]
    with fuyou.Engine("llama-10m", ssd=[tmp_path], host_memory=enough, batch_shape=(1, 64)) as engine:
        engine(**{name: value.view(1, 64) for name, value in BATCH.items()}).loss.backward()
        engine.step()


def test_single_slot_refuses_a_torn_state(tmp_path: Path) -> None:
    engine = small_engine(tmp_path, single_slot=True)
    engine(**BATCH).loss.backward()
    engine.close()  # updates have begun; the step was never ended
    with pytest.raises(FinetuneError, match="mixture"):
        small_engine(tmp_path, single_slot=True, resume=True)


@pytest.mark.parametrize("options", [{"deferred_fraction": 0.5}, {"max_grad_norm": 0.5}], ids=str)
def test_an_interrupt_in_a_forward_pass_keeps_the_step_before_it(
    options: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: dict[float | None, list[float]]
) -> None:
    """Also where that step's updates are a part of the forward pass that is given up."""
    expected = undisturbed[options.get("max_grad_norm")]
    original = StepComputation._block_forward

    def block_forward(self: StepComputation, task: Task, number: int) -> None:
        if self.tasks.step == 3 and number == 1:
            raise KeyboardInterrupt
        original(self, task, number)

    engine = small_engine(tmp_path, lr=1e-3, **options)
    assert train(engine, 2) == expected[:2]
    with monkeypatch.context() as patch:
        patch.setattr(StepComputation, "_block_forward", block_forward)
        with pytest.raises(KeyboardInterrupt):
            engine(**BATCH)
        engine.close()
    assert engine.committed_step == 2
    with small_engine(tmp_path, lr=1e-3, resume=True, **options) as engine:
        assert engine.step_count == 2
        assert train(engine, 2) == expected[2:]
