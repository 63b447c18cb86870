"""The picture has the trace's lanes; without matplotlib it is said how to get it."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import UserError
from fuyou.runtime.trace import Span, write_spans
from fuyou.schedule.tasks import Resource
from tests.helpers.scripts import SCRIPTS, load_script


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
    compute, reads = load_script("plot_step").read_lanes(trace)
    assert (compute.label, reads.label) == ("computing: compute", "SSDs: parameter read")
    assert compute.bars == [(0.0, 500.0, "block 0 forward"), (500.0, 250.0, "block 1 forward")]
    assert reads.bars == [(250.0, 250.0, "block 1 parameters")]


@pytest.mark.parametrize("content", [None, "", "[]", json.dumps({"traceEvents": [{"ph": "X"}]})])
def test_what_is_no_trace(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "wrong.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=r"wrong.json (cannot be read|is not a trace)"):
        load_script("plot_step").read_lanes(file)


def test_the_command(trace: Path, tmp_path: Path) -> None:
    picture = tmp_path / "step.png"
    done = subprocess.run([sys.executable, SCRIPTS / "plot_step.py", trace, picture], capture_output=True, text=True)
    if importlib.util.find_spec("matplotlib") is None:
        assert done.returncode == 2
        assert done.stderr.startswith("plot_step: error: Drawing needs matplotlib: pip install 'fuyou[plots]'")
    else:
        assert done.returncode == 0, done.stderr
        assert picture.read_bytes().startswith(b"\x89PNG")
