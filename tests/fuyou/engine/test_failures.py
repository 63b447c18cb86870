"""What happens when something dies: nobody hangs, nothing is left behind, the last committed step is intact."""

import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

import fuyou
from common.errors import FinetuneError, UserError
from fuyou.runtime.compute.step_computation import StepComputation
from fuyou.schedule.tasks import Task
from tests.helpers.small_engine import BATCH, small_engine, train
from tests.helpers.twin import tiny_configs


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
    child = engine._run.pids()[1]
    os.kill(child, signal.SIGKILL)
    with pytest.raises(FinetuneError, match="optimizer process was killed"):  # not: has not answered
        train(engine, 2)
    engine.close()
    assert not psutil.pid_exists(child)
    with small_engine(tmp_path, lr=1e-3, resume=True) as engine:
        assert engine.step_count == 2
        assert train(engine, 2) == expected[2:]


def test_a_bad_batch_is_rejected_and_changes_nothing(
    tmp_path: Path, undisturbed: dict[float | None, list[float]]
) -> None:
    with small_engine(tmp_path, lr=1e-3) as engine:
        losses = train(engine, 1)
        for wrong in (10**6, -3):
            ids = BATCH["input_ids"].clone()
            ids[1, 3] = wrong
            with pytest.raises(UserError, match=f"input_ids holds {wrong}, and this model's tokens are 0 to"):
                engine(input_ids=ids, labels=BATCH["labels"])
        assert losses + train(engine, 3) == undisturbed[None]


def test_other_contents_of_a_batch_are_accepted_or_rejected_and_never_waited_for(
    tmp_path: Path, undisturbed: dict[float | None, list[float]]
) -> None:
    """What transformers' trainers pass, what is no tensor, what has another shape: before anything is scheduled."""
    ids, targets, most = BATCH["input_ids"], 62, tiny_configs()["llama"].vocab_size
    accepted: list[dict[str, Any]] = [
        {
            "use_cache": False,
            "return_dict": True,
            "output_hidden_states": False,
            "num_items_in_batch": targets,
        },
        {"num_items_in_batch": torch.tensor(targets), "position_ids": None, "logits_to_keep": 0},
        {"labels": BATCH["labels"].int(), "input_ids": ids.to(torch.int32)},
        {"attention_mask": torch.ones_like(ids), "position_ids": torch.arange(32).expand(2, -1)},
    ]
    refused: list[tuple[str, dict[str, Any]]] = [
        ("output_hidden_states is True", {"output_hidden_states": True}),
        (
            "num_items_in_batch is 100, and the loss is the mean over the 62 labels",
            {"num_items_in_batch": 100},
        ),
        ("pixel_values is a list of 1 for 2 sequences", {"pixel_values": [torch.zeros(1, 3)]}),
        ("pixel_values is a list of 3 for 2 sequences", {"pixel_values": [None] * 3}),
        ("shift_labels: the engine shifts labels itself", {"shift_labels": ids}),
        (r"extra \[3\] cannot be split", {"extra": torch.zeros(3)}),
        ("labels is a ndarray", {"labels": BATCH["labels"].numpy()}),
        ("input_ids is a list", {"input_ids": ids.tolist()}),
        ("it is float32", {"labels": BATCH["labels"].float()}),
        (r"labels are \[2, 31\] and input_ids \[2, 32\]", {"labels": BATCH["labels"][:, 1:]}),
        (
            f"labels hold {most}, and this model's tokens are 0 to {most - 1}",
            {"labels": BATCH["labels"] + most - 63},
        ),
        ("labels hold -7", {"labels": BATCH["labels"].masked_fill(ids == 5, -7)}),
        ("attention_mask is int64", {"attention_mask": torch.ones(2, 31, dtype=torch.int64)}),
        ("position_ids is int64", {"position_ids": torch.arange(31).expand(2, -1)}),
        ("position_ids is a list", {"position_ids": [torch.arange(32)] * 2}),
    ]
    with small_engine(tmp_path, lr=1e-3) as engine:
        losses = []
        for number, good in enumerate(accepted):
            for sentence, bad in refused[number :: len(accepted)]:
                for call in (engine, engine.eval_loss):
                    with pytest.raises(UserError, match=sentence):
                        call(**{**BATCH, **bad})
                assert not engine.in_step
            loss = engine(**{**BATCH, **good}).loss
            loss.backward()
            engine.step()
            losses.append(loss.item())
    assert losses == undisturbed[None]


def test_a_batch_that_is_too_large_for_the_budgets_changes_nothing(
    tmp_path: Path, undisturbed: dict[float | None, list[float]]
) -> None:
    with small_engine(tmp_path, lr=1e-3) as engine:
        losses = train(engine, 1)
        long = torch.arange(3 << 18).view(1, -1) % 64
        for _ in range(2):  # a plan that was refused is not taken for one that holds
            with pytest.raises(UserError, match="host_memory"):
                engine(input_ids=long, labels=long, attention_mask=(long > 0).long())
        assert losses + train(engine, 3) == undisturbed[None]


def test_a_second_backward_pass_is_rejected(
    tmp_path: Path, undisturbed: dict[float | None, list[float]]
) -> None:
    with small_engine(tmp_path, lr=1e-3) as engine:
        losses = []
        for _ in range(2):
            loss = engine(**BATCH).loss
            loss.backward()
            with pytest.raises(FinetuneError, match=r"backward\(\) was called twice.*engine.step\(\)"):
                loss.backward()
            engine.step()
            with pytest.raises(FinetuneError, match="has ended"):
                loss.backward()
            losses.append(loss.item())
    assert losses == undisturbed[None][:2]


def test_a_user_state_that_would_not_come_back_is_rejected(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        states = [{"x": value} for value in (torch.ones(1), np.float32(1), math.nan, (1, 2), {2: 3})]
        for state in ([1], "text", None, {1: "x"}, *states):
            with pytest.raises(UserError, match="user_state"):
                engine.user_state = state  # type: ignore[assignment]
        out = engine(**BATCH)
        out.loss.backward()
        engine.user_state["deep"] = state  # which no setter sees
        with pytest.raises(UserError, match="user_state would come back different"):
            engine.step()
        engine.user_state["deep"] = {"x": [1, 2]}
        engine.step()
    with small_engine(tmp_path, resume=True) as engine:
        assert engine.user_state == {"deep": {"x": [1, 2]}}
        assert engine.step_count == 1


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"deferred_fraction": 1.0}, marks=pytest.mark.slow), {"host_cache": 0}]
)
def test_an_abandoned_step_counts_for_nothing(
    tmp_path: Path, options: dict[str, Any], undisturbed: dict[float | None, list[float]]
) -> None:
    """At any point: after the forward pass, in the backward pass, after it."""
    other = {name: (value + 1) % 64 for name, value in BATCH.items()}
    with small_engine(tmp_path, lr=1e-3, **options) as engine:
        losses = train(engine, 1)
        for how_far in ("forward", "backward"):
            loss = engine(**other).loss
            if how_far == "backward":
                loss.backward()
            with pytest.raises(FinetuneError, match=r"engine.abandon\(\)"):
                engine(**other)
            engine.abandon()
            assert engine.step_count == len(losses)
            losses += train(engine, 1)
        assert losses + train(engine, 1) == undisturbed[None]


@pytest.mark.slow
def test_death_of_the_engine_ends_the_optimizer_process(tmp_path: Path) -> None:
    script = textwrap.dedent(f"""
        import sys, os, signal
        from pathlib import Path
        from tests.helpers.small_engine import small_engine, train
        engine = small_engine(Path({str(tmp_path)!r}))
        train(engine, 1)
        engine.flush()
        print(engine._run.pids()[1], flush=True)
        train(engine, 1000000)
    """)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment
    )
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


@pytest.mark.parametrize(
    "wrong",
    [
        {"weight_decay": math.inf}, {"weight_decay": -0.1}, {"eps": math.nan}, {"eps": -1e-8}, {"betas": (0.9,)},
        {"betas": (math.nan, 0.9)}, {"betas": (0.9, 1.0)}, {"betas": (-0.1, 0.9)}, {"max_grad_norm": math.inf},
        {"max_grad_norm": math.nan}, {"max_grad_norm": -1.0}, {"max_grad_norm": 0.0},
    ],
    ids=str,
)  # fmt: skip
def test_numbers_that_are_none_are_rejected(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=list(wrong)[-1]):
        small_engine(tmp_path, **wrong)
    assert not list(tmp_path.iterdir())


def test_weights_that_have_diverged_are_not_exported_unless_requested(tmp_path: Path) -> None:
    (tmp_path / "ssd").mkdir()
    with small_engine(tmp_path / "ssd", lr=1e-3, dtype="fp32") as engine:
        train(engine, 1)
        engine.save_pretrained(tmp_path / "out")
        before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
        engine.lr = 1e39  # finite, and no fp32 number
        train(engine, 1)
        with pytest.raises(FinetuneError, match=r"holds a NaN or an infinity\. Train again with a lower lr"):
            engine.save_pretrained(tmp_path / "out")
        assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before
        engine.save_pretrained(tmp_path / "out", allow_nonfinite=True)
        exported = load_file(tmp_path / "out" / "model.safetensors")
        assert any(not value.isfinite().all() for value in exported.values())
        with pytest.raises(fuyou.NonFiniteLoss, match="step 2 is committed") as caught:
            train(engine, 1)
        assert "intact" not in str(caught.value)


def test_positions_that_a_learned_table_does_not_have_are_rejected(tmp_path: Path) -> None:
    config = tiny_configs()["gpt2"]
    with fuyou.Engine(config, ssd=[tmp_path], host_memory="600MiB", batch_shape=(2, 32)) as engine:
        for first in (config.max_position_embeddings - 31, -1):
            with pytest.raises(UserError, match=r"position_ids hold .*, and this model's positions are 0 to"):
                engine(**BATCH, position_ids=torch.arange(first, first + 32).expand(2, -1))
        assert not engine.in_step


def test_tensors_made_on_another_device_by_default_are_rejected(tmp_path: Path) -> None:
    with torch.device("meta"), pytest.raises(UserError, match="makes all tensors on meta"):
        small_engine(tmp_path)


def test_misuse_is_reported(tmp_path: Path) -> None:
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
        with pytest.raises(
            FinetuneError, match=r"multiplied by 0\.25 .* call backward\(\) on the loss itself"
        ):
            (out.loss / 4).backward()


def test_a_store_is_not_overwritten_and_not_mistaken(tmp_path: Path) -> None:
    small_engine(tmp_path, dtype="bf16").close()
    with pytest.raises(UserError, match="resume=True"):
        small_engine(tmp_path)
    with pytest.raises(UserError, match="another dtype"):
        small_engine(tmp_path, resume=True, dtype="fp32")
    with pytest.raises(UserError, match="another model"):
        fuyou.Engine(tiny_configs()["gpt2"], ssd=[tmp_path], host_memory="600MiB", resume=True)
    small_engine(tmp_path, overwrite=True).close()


@pytest.mark.parametrize("options", [{"deferred_fraction": 0.5}, {"max_grad_norm": 0.5}], ids=str)
def test_an_interrupt_in_a_forward_pass_keeps_the_step_before_it(
    options: dict,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: dict[float | None, list[float]],
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


def test_an_exception_inside_an_evaluation_leaves_nothing_waiting(
    tmp_path: Path, undisturbed: dict[float | None, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ValueError("this block cannot")

    with small_engine(tmp_path, lr=1e-3) as engine:
        losses = train(engine, 1)
        with monkeypatch.context() as patched:
            patched.setattr(engine._run.model.stack.blocks[1], "forward", fails)
            with pytest.raises(ValueError, match="this block cannot"):
                engine.eval_loss(**BATCH)
        losses += train(engine, 2)  # on the same lanes
        with monkeypatch.context() as patched:
            patched.setattr(engine._run.model.stack.blocks[0], "forward", fails)
            with pytest.raises(ValueError, match="this block cannot"):
                engine.eval_loss(**BATCH)
    assert losses == undisturbed[None][:3]
