"""A reference or a teacher that is killed in its pass over the data: the run goes on, and is the same."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cli.train.reference
from cli.main import main
from cli.train.reference import ReferencePass
from cli.train.row_table import RowTable
from tests.cli.conftest import Finetune

PAIRS = [{"prompt": f"{i} plus {i} is", "chosen": f" surely {2 * i}.", "rejected": f" {i * i + 1}?"} for i in range(6)]
TEXTS = [{"text": f"{i} and {i * i} are numbers, and so is {i + 1}. " * 2} for i in range(6)]
KILLED = 137


def killed_at(call: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose call of that number never comes about."""
    calls = 0

    def killing(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            os._exit(KILLED)
        return function(*args, **named)

    return killing


POINTS: dict[str, tuple[Any, str, int]] = {
    "dpo": (cli.train.reference.np, "savez", 1),
    "reference": (ReferencePass, "_rows", 2),
    "distil": (RowTable, "_mark", 5),
}


@pytest.mark.parametrize("kind", POINTS)
def test_a_pass_that_is_killed(kind: str, checkpoint: Path, finetune: Finetune, tmp_path: Path) -> None:
    data, report = tmp_path / "data.jsonl", tmp_path / "report.json"
    records = TEXTS if kind == "distil" else PAIRS
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    words: tuple[Any, ...] = ("--model", checkpoint, "--data", data, "--gpu", "cpu", "--host-memory", "600MiB")
    words += ("--dtype", "fp32", "--batch-size", "3", "--steps", "3", "--no-save", "--report", report, "--quiet")
    words += {
        "dpo": ("--objective", "dpo"),
        "reference": ("--objective", "dpo", "--reference", checkpoint),
        "distil": ("--objective", "distil", "--teacher", checkpoint, "--beta", "0.5", "--seq-len", "48"),
    }[kind]
    assert finetune(*words, "--output", "whole").status == 0
    expected = json.loads(report.read_text())["losses"]
    owner, name, call = POINTS[kind]
    child = os.fork()
    if not child:
        setattr(owner, name, killed_at(call, getattr(owner, name)))
        os._exit(main([str(word) for word in (*words, "--output", "killed")]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED
    done = finetune(*words, "--output", "killed", "--resume", "auto")
    assert done.status == 0, done.err
    assert json.loads(report.read_text())["losses"] == expected
    assert not list(Path("killed").glob("*-consulted"))
