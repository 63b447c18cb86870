"""All ways of running of which every crash point can be tried, by name; ``tests/crash/all_points.py`` does so."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common.models.adapters.options import ALL_LINEAR, AdapterOptions
from tests.helpers.crash import cluster, ranks
from tests.helpers.crash.drives import Fault
from tests.helpers.crash.journal import ENDINGS as OF_FILES
from tests.helpers.crash.journal import KILLED
from tests.helpers.crash.outputs import COMMANDS, Command, Recorded
from tests.helpers.crash.points import ENDINGS, Move, crash, crash_move, move_reference, reference
from tests.helpers.crash.runs import Run

Attempt = Callable[[Path, int, str, bool], bool]
"""One crash, in a directory to be made: at a call, by an action, with a power cut or without. Returns whether it came
before the end of the run.

Raises:
    AssertionError: something does not hold.
"""


@dataclass(frozen=True)
class Way:
    """A way of running, as it is when nothing happens to it."""

    calls: int
    """That it makes to its drives."""
    attempt: Attempt
    endings: tuple[tuple[str, bool], ...] = ENDINGS


def _seed(number: int, power: bool) -> int | None:
    """What a power cut takes with it is drawn again for each call."""
    return number if power else None


def _training(options: dict[str, Any], folder: Path, model: str = "dense") -> Way:
    expected = reference(Run(folder / "undisturbed", options, model=model))

    def attempt(root: Path, number: int, action: str, power: bool) -> bool:
        run = Run(root, options, fault=Fault(number, action), model=model)
        return crash(run, expected, _seed(number, power))

    return Way(expected.calls, attempt)


def _moving(move: Move, folder: Path) -> Way:
    """Every other crash is first tried on the old drives again."""
    expected = move_reference(folder / "undisturbed", move)

    def attempt(root: Path, number: int, action: str, power: bool) -> bool:
        return crash_move(root, move, Fault(number, action), expected, _seed(number, power), number % 2 == 0)

    # One process makes all calls.
    return Way(expected.calls, attempt, tuple(ending for ending in ENDINGS if ending[0] != "kill self"))


def _in_memory(strategy: str, folder: Path) -> Way:
    options = {"model": cluster.make_model(folder / "model"), "strategy": strategy}
    expected = reference(cluster.ClusterRun(folder / "undisturbed", options))

    def attempt(root: Path, number: int, action: str, power: bool) -> bool:
        run = cluster.ClusterRun(root, options, fault=Fault(number, action))
        return cluster.crash(run, expected, _seed(number, power))

    return Way(expected.calls, attempt)


def _out_of_core(story: ranks.Story, folder: Path) -> Way:
    expected = ranks.reference(folder / "undisturbed", story)

    def attempt(root: Path, number: int, action: str, power: bool) -> bool:
        return ranks.crash(root, story, Fault(number, action), expected, _seed(number, power))

    return Way(expected.calls, attempt)


def _command(command: Command, folder: Path) -> Way:
    recorded = Recorded(command, folder)

    def attempt(root: Path, number: int, ending: str, power: bool) -> bool:
        point = recorded.points[number - 1]
        faults = recorded.faults(point, ending)
        assert not faults, f"{recorded.kind(point)}: {'; '.join(faults)}"
        recorded.resume(root, point, ending)
        return True

    return Way(len(recorded.points), attempt, tuple((ending, ending != KILLED) for ending in OF_FILES))


#: Model, and options with which its block is in pieces: a dense one in two; a mixture in what stands around its
#: experts, and two ranges of these. ``adapters`` are on experts, router and attention.
PIECES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("block", {"piece_size": 12 << 10, "host_cache": 0}),
    "mixture": ("mixture", {"piece_size": 8960, "host_cache": 0}),
    "adapters": (
        "mixture", {"piece_size": 8960, "host_cache": 0, "adapters": AdapterOptions(2, 4.0, 0.0, (ALL_LINEAR,))}
    ),
}  # fmt: skip


#: Each is undisturbed first, in a folder that is there.
WAYS: dict[str, Callable[[Path], Way]] = {
    "moving: one drive more": partial(_moving, Move((0, 1), (0, 1, 2))),
    "moving: one drive fewer": partial(_moving, Move((0, 1, 2), (1, 2))),
    "moving: other drives": partial(_moving, Move((0, 1), (2,))),
    "training: states in host memory": partial(_training, {}),
    "training: everything streamed": partial(_training, {"host_cache": 0}),
    "training: clipping (all updates deferred)": partial(_training, {"max_grad_norm": 0.5}),
    "training: clipping (two steps of three updated again)": partial(
        _training, {"max_grad_norm": 1.55, "clip_by": "speculation", "host_cache": 0}
    ),
    "training: half of the updates deferred": partial(_training, {"deferred_fraction": 0.5, "host_cache": 0}),
    "training: commit every 2 steps": partial(_training, {"commit_every": 2}),
    "training: moments in 8 bits": partial(_training, {"optimizer": "adamw8bit", "host_cache": 0}),
    "training: past host memory (all updates deferred)": partial(
        _training, {"io": "kvikio", "max_grad_norm": 0.5, "host_cache": 0}
    ),
    "training: rows in chunks": partial(_training, {"chunk": 6, "host_cache": 0}),
    "training: fp32": partial(_training, {"dtype": "fp32", "host_cache": 0}),
    **{
        f"pieces: {name}": partial(_training, options, model=model)
        for name, (model, options) in PIECES.items()
    },
    # Cut over both ranks; whole on each of them, which take turns in writing.
    "ranks in memory: fcdp": partial(_in_memory, "fcdp"),
    "ranks in memory: N/N/N": partial(_in_memory, "N/N/N"),
    **{f"out of core: {name}": partial(_out_of_core, story) for name, story in ranks.STORIES.items()},
    **{f"files: {name}": partial(_command, command) for name, command in COMMANDS.items()},
}
