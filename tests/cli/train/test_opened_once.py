"""One decision once: a run reads its configuration, opens its model, and plans its memory once."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import common.models.meta_model
import common.models.presets
from cli.main import main
from fuyou.model.open_model import OpenModel
from fuyou.model.streamed_model import StreamedModel
from fuyou.schedule.memory_planner import MemoryPlanner


@pytest.mark.parametrize("adapted", [False, True])
def test_what_a_run_opens(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapted: bool
) -> None:
    counts = Counter[str]()

    def counting(name: str, called: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **more: Any) -> Any:
            counts[name] += 1
            return called(*args, **more)

        return counted

    for module in ("cli.job.model", "cli.job.machine", "fuyou.engine.opening", "fuyou.planner.training_job"):
        monkeypatch.setattr(
            f"{module}.load_config", counting("configurations", common.models.presets.load_config)
        )
    build = counting("meta models", common.models.meta_model.build_meta_model)
    monkeypatch.setattr("common.models.adapters.adapted_model.build_meta_model", build)
    for kind in (OpenModel, StreamedModel, MemoryPlanner):
        monkeypatch.setattr(kind, "__init__", counting(kind.__name__, kind.__init__))
    # Its small models are others
    monkeypatch.setattr("fuyou.engine.opening.prove_once", lambda *args, **more: None)

    words = ["train", "--model", str(checkpoint), "--data", "random", "--steps", "1", "--batch-size", "1"]
    words += [
        "--seq-len",
        "16",
        "--gpu",
        "cpu",
        "--output",
        str(tmp_path / "out"),
        *["--lora-rank", "2"] * adapted,
    ]
    assert main(words) == 0
    assert counts == {
        "configurations": 1,
        "meta models": 1 + adapted,  # the names of the model without adapters are read from another
        "OpenModel": 1,
        "StreamedModel": 1,
        "MemoryPlanner": 2,  # with default settings, and with those that were chosen
    }
