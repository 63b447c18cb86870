"""A newcomer's first hours with ``finetune``: each action of scripts/first_day.py ends as the docs say.

pytest -m slow tests/cli/first_day -k resumed    # the actions whose names have the word
"""

from pathlib import Path

import pytest
from first_day import ACTIONS, Ended, Step, faults, make_materials, run_action

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the models and the data of all actions."""
    folder = tmp_path_factory.mktemp("first-day")
    make_materials(folder)
    return folder


@pytest.mark.parametrize("name", ACTIONS)
def test_an_action_ends_as_the_docs_say(name: str, work: Path, tmp_path: Path) -> None:
    assert not run_action(name, work, tmp_path / "day")[1]


def test_what_is_wrong_is_found(tmp_path: Path) -> None:
    step = Step("finetune", 2, ("said",), ("never",), within=1, leaves=["made"])
    assert not faults(Step("finetune"), Ended(), tmp_path)
    assert faults(step, Ended(1, "never Traceback", 2.0, 4.0), tmp_path) == [
        "status 1 instead of 2",
        "does not print 'said'",
        "prints 'Traceback'",
        "prints 'never'",
        "prints nothing for 4.0 s",
        "takes 2.0 s instead of 1",
        "leaves no made",
    ]
