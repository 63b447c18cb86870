"""What the optimizer process imports, which every run waits for, and how it starts before that."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fuyou.optimizer.process.start import started_early
from tests.helpers.small_engine import small_engine, train


def test_the_optimizer_process_starts_without_transformers() -> None:
    """It is PyTorch that it needs: the rest took more than half of the time until it was up."""
    program = (
        "import sys, fuyou.optimizer.process.main; print(*({'transformers', 'peft'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == []


@pytest.mark.real_start
def test_the_first_engine_takes_the_process_that_was_started_early(tmp_path: Path) -> None:
    before = set(psutil.Process().children())

    def children() -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if child not in before]

    with started_early():
        (early,) = children()
        with small_engine(tmp_path, run_name="a", lr=1e-3, prove=False) as engine:
            assert children() == [early]
            losses = train(engine, 2)
        assert children() == [] and not early.is_running()
        with small_engine(tmp_path, run_name="b", lr=1e-3, prove=False) as engine:  # starts its own
            assert early not in children() and train(engine, 2) == losses
    with started_early():  # an error ends what no engine has taken
        (unused,) = children()
    assert children() == [] and not unused.is_running()
