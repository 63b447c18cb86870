"""The picture of a run has what its metrics have; what is no run is refused."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

from tests.helpers.scripts import load_script


@pytest.fixture(scope="module")
def plot_run() -> ModuleType:
    return load_script("plot_run")


def test_the_command(plot_run: ModuleType, tmp_path: Path) -> None:
    rows = [{"step": 0, "validation_metrics/loss": 3.0}] + [
        {"step": step, "loss_metrics/global_avg_loss": 3.0 / step, "lr": 1e-3, "grad_norm": 1.0, "ssd/read(GiB)": 2.0}
        for step in (1, 2, 3)
    ]
    (tmp_path / "run").mkdir()
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = plot_run.read_metrics(plot_run.find_metrics(tmp_path))
    assert plot_run.points(read, "validation_metrics/loss") == ([0], [3.0])
    assert plot_run.points(read, "loss_metrics/global_avg_loss") == ([1, 2, 3], [3.0, 1.5, 1.0])
    done = CliRunner().invoke(plot_run.main, [str(tmp_path)])
    if importlib.util.find_spec("matplotlib") is None:
        assert done.exit_code == 2 and "Drawing needs matplotlib: pip install 'fuyou[plots]'" in done.output
    else:
        assert done.exit_code == 0, done.output
        assert (tmp_path / "run" / "run.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("content", "message"), [
    (None, "is not the output directory of a run"), ("", "no step in it"), ("no json\n", "does not hold"),
    ('{"lr": 1}\n', "no step in it"), ("[1]\n", "no step in it"),
])  # fmt: skip
def test_what_is_no_run(plot_run: ModuleType, tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    done = CliRunner().invoke(plot_run.main, [str(tmp_path)])
    assert done.exit_code == 2 and message in done.output
