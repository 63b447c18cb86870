"""A run that is killed in its reference's pass over the data, or after: it continues, and is the same."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

import cli.train.objectives
from cli.main import main
from cli.train.objectives import ReferencePass
from fuyou.engine.steps import Steps
from tests.cli.conftest import Finetune
from tests.helpers.command.histories import losses
from tests.helpers.command.kills import KILLED, killed_at

PAIRS = [
    {"prompt": f"{i} plus {i} is", "chosen": f" surely {2 * i}.", "rejected": f" {i * i + 1}?"}
    for i in range(6)
]


Whole = tuple[list[str], list[float]]


@pytest.fixture(
    scope="module",
    params=[pytest.param((), marks=pytest.mark.slow), ("--lora-rank", "2")],
    ids=["all weights", "adapters"],
)
def whole(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Whole:
    """A run that nothing happens to: its command line without the output, and its losses."""
    folder = tmp_path_factory.mktemp("whole")
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in PAIRS))
    words = shlex.split(
        "--gpu cpu --host-memory 600MiB --lr 1e-2 --dtype fp32 --batch-size 3 --steps 3 --no-save"
    )
    words += ["--objective", "dpo", "--model", str(checkpoint), "--data", str(data)]
    words += request.param
    assert main([*words, "--output", str(folder / "whole")]) == 0
    return words, losses(folder / "whole")


@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [(ReferencePass, "_rows", 2), (cli.train.objectives.np, "savez", 1), (Steps, "end", 2)],
)
def test_a_pass_that_is_killed(owner: Any, name: str, call: int, whole: Whole, finetune: Finetune) -> None:
    """In its pass, while its file is written, and in the second step."""
    words, expected = whole
    assert killed_at(owner, name, call, [*words, "--output", "killed"]) == KILLED
    done = finetune(*words, "--output", "killed", "--resume", "auto")
    assert done.status == 0, done.err
    assert losses(Path("killed")) == expected and expected[-1] < 0.68
