"""How threads wait is decided before PyTorch is loaded, in every process of ours, and by the user if they want."""

import os
import subprocess
import sys

from common.openmp import SPIN_ROUNDS, WAITING_VARIABLES, let_threads_sleep

import pytest


@pytest.mark.parametrize("name", WAITING_VARIABLES)
def test_what_the_user_has_set_wins(name: str) -> None:
    environment = {name: "17"}
    let_threads_sleep(environment)
    assert environment == {name: "17"}


@pytest.mark.parametrize("module", ["cli.main", "fuyou.optimizer.process.main"])
def test_the_library_in_use_reads_it_in_every_process_of_ours(module: str) -> None:
    """What libgomp says of itself once our module has loaded PyTorch, or the command is about to."""
    clean = {name: value for name, value in os.environ.items() if name not in WAITING_VARIABLES}
    code = f"import {module}, torch, os; print(os.environ['OMP_WAIT_POLICY'], os.environ['GOMP_SPINCOUNT'])"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**clean, "OMP_DISPLAY_ENV": "verbose"}, capture_output=True, text=True,
        timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["PASSIVE", str(SPIN_ROUNDS)]
    # Other libraries than GNU's (a PyTorch from conda) say the policy alone.
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr or "OMP_WAIT_POLICY='PASSIVE'" in done.stderr
    if "GOMP_SPINCOUNT" in done.stderr:
        assert f"GOMP_SPINCOUNT = '{SPIN_ROUNDS}'" in done.stderr
