"""Trackers get the lines of metrics.jsonl, and none of them stops a run. Their packages are stand-ins here."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from tests.cli.conftest import Finetune

RUN = ("--model", "llama-10m", "--data", "random", "--batch-size", 1, "--seq-len", 8, "--gpu", "cpu", "--steps", 3,
       "--no-save")  # fmt: skip


class Noting(GeneralTracker):
    """Notes its calls; the one that wants a folder fails at step 2."""

    told: list[tuple[Any, ...]] = []  # noqa: RUF012
    requires_logging_directory = False
    main_process_only = True

    def __init__(self, **arguments: Any) -> None:
        self.name = "tensorboard" if "logging_dir" in arguments else "wandb"
        self.told.append((self.name, "begin", arguments))

    @property
    def tracker(self) -> None:
        return None

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.told.append((self.name, "options", values))

    def log(self, values: dict[str, Any], step: int | None = None, **more: Any) -> None:
        if self.name == "tensorboard" and step == 2:
            raise ConnectionError("no route to host")
        self.told.append((self.name, step, values))

    def finish(self) -> None:
        self.told.append((self.name, "finish"))


class NotingInFolder(Noting):
    requires_logging_directory = True


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: name in ("wandb", "tensorboard") or find(name)
    )
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", Noting)
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "tensorboard", NotingInFolder)
    Noting.told.clear()
    return Noting.told


def test_each_gets_every_step_until_it_fails(
    finetune: Finetune, told: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    outcome = finetune(*RUN, "--output", output, "--log-to", "wandb", "tensorboard")
    assert outcome.status == 0, outcome.err
    assert "tracker  tensorboard gets no more metrics: ConnectionError: no route to host" in outcome.out
    by_name = {name: [what for who, *what in told if who == name] for name in ("wandb", "tensorboard")}
    assert [what[0] for what in by_name["wandb"]] == ["begin", "options", 1, 2, 3, "finish"]
    assert [what[0] for what in by_name["tensorboard"]] == ["begin", "options", 1]
    run = json.loads((output / "run/run.json").read_text())["id"]
    given = by_name["wandb"][0][1]
    assert (given["run_name"], given["name"], given["id"]) == ("finetune", f"out-{run[:8]}", run)
    assert by_name["tensorboard"][0][1] == {
        "run_name": f"out-{run[:8]}",
        "logging_dir": f"{output}/run/trackers",
    }
    assert (
        by_name["wandb"][1][1]["batch_size"] == 1 and by_name["wandb"][1][1]["log_to"] == "wandb tensorboard"
    )
    second = json.loads((output / "run/metrics.jsonl").read_text().splitlines()[1])
    assert by_name["wandb"][3][1] == {name: value for name, value in second.items() if name != "step"}


def test_one_that_cannot_start_is_a_message(
    finetune: Finetune, told: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PermissionError("not logged in")

    monkeypatch.setattr(Noting, "__init__", fail)
    outcome = finetune(*RUN, "--output", tmp_path / "out", "--log-to", "wandb")
    assert outcome.status == 2
    assert (
        "--log-to wandb cannot start: PermissionError: not logged in. Fix that, or leave wandb out"
        in outcome.err
    )


def test_a_package_that_is_not_installed(finetune: Finetune, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    outcome = finetune(*RUN, "--log-to", "wandb")
    assert outcome.status == 2 and "-m pip install wandb`, or leave wandb out" in outcome.err
