"""``finetune --nodes`` on an emulated network whose cable is pulled out. Needs root, for network namespaces."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Finetune
from tests.helpers.command.histories import history
from tests.helpers.processes.namespaces import needs_namespaces, netcluster
from tests.helpers.processes.pairs import COMMON, UNMEASURED, same

PATIENCE_S = 6
SHORT_S = 2.0
STEPS = 8
"""Compared with those of one machine; the short cut falls between them."""


@needs_namespaces
@pytest.mark.slow
def test_a_short_cut_is_waited_out_and_a_long_one_ends_both_nodes_with_a_message(
    finetune: Finetune, checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    train = ("--model", checkpoint, "--data", data, *COMMON, "--no-save")
    assert finetune(*train, "--steps", STEPS, "--output", tmp_path / "reference").status == 0
    words = (*train, "--output", output)
    logs = [tmp_path / f"{node}.log" for node in range(2)]

    def steps() -> int:
        return len(re.findall(r"^step ", logs[0].read_text(), re.MULTILINE))

    def until(condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, [log.read_text() for log in logs]
            time.sleep(0.02)

    with netcluster.Cluster(2, "5mbit") as cluster:  # a step takes a third of a second
        meet = ("--nodes", 2, "--rdzv-endpoint", f"{cluster.address(0)}:29400", "--node-timeout", PATIENCE_S)
        more = (*UNMEASURED, "--steps", 10**6, "--commit-every", 2, "--max-restarts", 0)
        command = [sys.executable, "-m", "cli.main", *map(str, (*words, *meet, *more))]
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        launchers = []
        for node, log in enumerate(logs):
            with log.open("w") as file:
                launchers.append(
                    cluster.start(node, command, environment, stdout=file, stderr=subprocess.STDOUT)
                )
        until(lambda: steps() >= 2, 240)

        cluster.set_link(1, False)
        time.sleep(SHORT_S / 2)
        stuck_at = steps()
        time.sleep(SHORT_S / 2)
        assert steps() == stuck_at < STEPS
        cluster.set_link(1, True)
        until(lambda: steps() > STEPS, PATIENCE_S + 120)

        cluster.set_link(1, False)
        cut = time.monotonic()
        # Collectives wait for PATIENCE_S. The launcher that is cut off waits for its store, until it gives up.
        assert [launcher.wait(2 * PATIENCE_S + 60 + 120) for launcher in launchers] == [1, 1]
        assert time.monotonic() - cut > PATIENCE_S
    for log in logs:
        said = log.read_text()
        assert (
            "lost contact with another rank" in said
            and said.count("finetune: error: ") == 1
            and "To continue: finetune" in said
        )
        assert "Traceback" not in said and "terminate called" not in said

    last = max(int(path.name.removeprefix("step-")) for path in (output / "commits").glob("step-*"))
    done = finetune(*words, "--nodes", 1, "--gpus-per-node", 1, "--steps", last + 1, "--resume")
    assert done.status == 0, done.err
    assert f"resume   after step {last} of {last + 1}" in done.out
    assert len(history(output)) == last + 1
    same(history(output)[:STEPS], history(tmp_path / "reference"))
