"""How OpenMP's threads wait is decided before PyTorch is loaded, in every process of ours, unless the user decided."""

import os
import subprocess
import sys

import pytest

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def _waiting(module: str, **decided: str) -> tuple[list[str], str]:
    """Return the variables in a process that imported ``module``, and what its OpenMP library read if it has one."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    code = f"import {module}, os; print(*(os.environ.get(name) for name in {VARIABLES}))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**environment, "OMP_DISPLAY_ENV": "verbose", **decided},
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout.split(), done.stderr


@pytest.mark.parametrize("module", ["cli.main", "fuyou.optimizer.process.main"])  # the second loads PyTorch
def test_threads_spin_briefly_in_every_process_of_ours(module: str) -> None:
    variables, read = _waiting(module)
    assert variables == ["None", "2000", "0"]
    if "GOMP_SPINCOUNT" in read:  # only GNU's library shows it
        assert "GOMP_SPINCOUNT = '2000'" in read


def test_what_the_user_has_set_wins() -> None:
    for name in VARIABLES:
        variables, _ = _waiting("common", **{name: "17"})
        assert variables == ["17" if variable == name else "None" for variable in VARIABLES]
