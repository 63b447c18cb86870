"""How threads wait is decided before PyTorch is loaded, in every process of ours, and by the user if they want."""

import os
import subprocess
import sys
from pathlib import Path

from common.openmp import LONG_SPIN, SHORT_SPIN, WAITING_VARIABLES, decide_waiting, spin_briefly, spins_long

import pytest

from common import openmp


@pytest.mark.parametrize("name", WAITING_VARIABLES)
def test_what_the_user_has_set_wins(name: str) -> None:
    environment = {name: "17"}
    decide_waiting(environment)
    spin_briefly(environment)
    assert environment == {name: "17"}
    assert not spins_long(environment)


def test_the_default_of_gnu_is_not_taken_for_ours_if_the_user_has_set_it() -> None:
    environment = {"GOMP_SPINCOUNT": str(LONG_SPIN)}
    spin_briefly(environment)
    assert environment == {"GOMP_SPINCOUNT": str(LONG_SPIN)}


def test_the_optimizer_process_spins_briefly_beside_the_one_that_computes() -> None:
    environment: dict[str, str] = {}
    decide_waiting(environment)
    assert spins_long(environment)
    spin_briefly(environment)
    assert environment["GOMP_SPINCOUNT"] == str(SHORT_SPIN)
    assert not spins_long(environment)


def test_they_spin_briefly_where_nobody_would_notice_that_processors_are_shared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(openmp, "SCHEDULER_TIMES", tmp_path / "schedstat")
    environment: dict[str, str] = {}
    decide_waiting(environment)
    assert environment["GOMP_SPINCOUNT"] == str(SHORT_SPIN)


@pytest.mark.parametrize("module", ["cli.main", "fuyou.optimizer.process.main"])
def test_the_library_in_use_reads_it_in_every_process_of_ours(module: str) -> None:
    """What libgomp says of itself once our module has loaded PyTorch, or the command is about to."""
    clean = {name: value for name, value in os.environ.items() if name not in WAITING_VARIABLES}
    code = f"import {module}, torch, os; print(os.environ['OMP_WAIT_POLICY'], os.environ['GOMP_SPINCOUNT'])"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**clean, "OMP_DISPLAY_ENV": "verbose"}, capture_output=True, text=True,
        timeout=120, check=True,
    )  # fmt: skip
    policy, spin = done.stdout.split()
    assert policy == "ACTIVE"
    assert spin == str(LONG_SPIN if openmp.SCHEDULER_TIMES.exists() else SHORT_SPIN)
    # Other libraries than GNU's (a PyTorch from conda) say the policy alone.
    assert "OMP_WAIT_POLICY = 'ACTIVE'" in done.stderr or "OMP_WAIT_POLICY='ACTIVE'" in done.stderr
    if "GOMP_SPINCOUNT" in done.stderr:
        assert f"GOMP_SPINCOUNT = '{spin}'" in done.stderr
