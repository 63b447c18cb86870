"""Nodes that train out of core, killed at calls drawn from a run; tests/crash/all_points.py tries every one."""

import itertools
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fuyou.checkpoint.run_files import find_runs, verify_run, without_common_step
from tests.helpers.crash.drives import Fault
from tests.helpers.crash.points import ENDINGS
from tests.helpers.crash.ranks import STORIES, RanksRun, crash, reference
from tests.helpers.crash.runs import execute


@pytest.mark.parametrize(("story", "crashes"), [("two nodes", 4), ("two nodes, then one", 4)])
@pytest.mark.slow
def test_a_crash_at_any_call(story: str, crashes: int, tmp_path: Path) -> None:
    """A rank, its optimizer process, or everything: the step that all have is found, and the rest is the same."""
    expected = reference(tmp_path / "undisturbed", STORIES[story])
    draw = random.Random(4)
    points = [(draw.randrange(1, expected.calls + 1), *ENDINGS[turn]) for turn in range(crashes)]

    def attempt(point: tuple[int, str, bool]) -> bool:
        number, action, power = point
        fault = Fault(number, action)
        return crash(tmp_path / str(number), STORIES[story], fault, expected, number if power else None)

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(attempt, points))


def test_a_node_whose_drive_was_replaced_by_an_empty_one(tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert execute(RanksRun(root, steps=1)).status == 0
    again = RanksRun(root, {"resume": True}, steps=2)
    (root / "node1").rename(root / "lost")
    without = execute(again)
    assert without.status == 1 and without.expected_error
    assert "Not all nodes can continue" in without.error and "node 1 (" in without.error, without.error
    alone = execute(RanksRun(root, {"resume": True}, nodes=1, steps=2))
    assert alone.status == 1 and "what node 1 had of its optimizer states is not here" in alone.error, (
        alone.error
    )
    for path in (root / "node1").iterdir():
        path.rmdir()
    (root / "node1").rmdir()
    (root / "lost").rename(root / "node1")
    assert execute(again).status == 0


def test_another_run_on_the_drives_of_a_new_node_stays(tmp_path: Path) -> None:
    root = tmp_path / "run"
    for node in (0, 1):
        assert execute(RanksRun(root, nodes=1, kept=(node,), steps=1 + node)).status == 0
    both = execute(RanksRun(root, {"resume": True}, steps=3))
    assert both.status == 1 and "holds another run than the one that continues here" in both.error, both.error
    for node in (0, 1):
        assert execute(RanksRun(root, {"resume": True}, nodes=1, kept=(node,), steps=2)).status == 0


def test_nodes_that_hold_copies_of_other_steps(tmp_path: Path) -> None:
    """They are named when they are verified exactly if the run is not continued with them."""
    root = tmp_path / "run"
    for step in (1, 2, 3):
        assert execute(RanksRun(root, {"resume": step > 1}, steps=step)).status == 0
        for node in (0, 1):
            shutil.copytree(root / f"node{node}", tmp_path / f"step{step}" / f"node{node}")
    for steps in itertools.product((1, 2, 3), repeat=2):
        for node, step in enumerate(steps):
            shutil.rmtree(root / f"node{node}")
            shutil.copytree(tmp_path / f"step{step}" / f"node{node}", root / f"node{node}")
        ranks = [verify_run(paths) for paths in find_runs([root / "node0", root / "node1"])]
        faults = list(without_common_step(ranks))
        assert [rank.step for rank in ranks] == list(steps) and not any(rank.damage for rank in ranks)
        assert bool(faults) == (abs(steps[0] - steps[1]) > 1), steps
        if steps in ((1, 3), (2, 3)):
            outcome = execute(RanksRun(root, {"resume": True}, steps=4))
            assert bool(outcome.status) == bool(faults), outcome.error
