"""The picture has the trace's lanes; without matplotlib it is said how to get it."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from common.errors import UserError
from fuyou.runtime.trace import Span, write_spans
from fuyou.schedule.tasks import Resource

SCRIPT = Path(__file__).parents[2] / "scripts" / "plot_step.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plot_step", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["plot_step"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    spans = [
        Span(Resource.GPU, "compute", "block 0 forward", 1.0, 1.5, 1),
        Span(Resource.GPU, "compute", "block 1 forward", 1.5, 1.75, 1),
        Span(Resource.SSD, "parameter read", "block 1 parameters", 1.25, 1.5, 1),
    ]
    write_spans(tmp_path / "step.json", spans, 1.0)
    return tmp_path / "step.json"


def test_lanes(trace: Path) -> None:
    compute, reads = load().read_lanes(trace)
    assert (compute.label, reads.label) == ("computing: compute", "SSDs: parameter read")
    assert compute.bars == [(0.0, 500.0, "block 0 forward"), (500.0, 250.0, "block 1 forward")]
    assert reads.bars == [(250.0, 250.0, "block 1 parameters")]


@pytest.mark.parametrize("content", [None, "", "[]", json.dumps({"traceEvents": [{"ph": "X"}]})])
def test_what_is_no_trace(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "wrong.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=r"wrong.json (cannot be read|is not a trace)"):
        load().read_lanes(file)


def test_the_command(trace: Path, tmp_path: Path) -> None:
    picture = tmp_path / "step.png"
    done = subprocess.run([sys.executable, SCRIPT, trace, picture], capture_output=True, text=True)
    if importlib.util.find_spec("matplotlib") is None:
        assert done.returncode == 2
        assert done.stderr.startswith("plot_step: error: Drawing needs matplotlib: pip install 'fuyou[plots]'")
    else:
        assert done.returncode == 0, done.stderr
        assert picture.read_bytes().startswith(b"\x89PNG")
