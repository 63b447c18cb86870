"""A plugin of pytest's that runs TRL's tests on stand-ins, and with ``--on-engine`` on the engine.

It appends what became of each test to ``--findings``, a line of JSON each: passed, failed, refused (a sentence of this
project's), or skipped, with the reason. A test that is there already is not run again.
"""

import importlib
import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from trl_tests import on_engine

_FOLDERS: dict[str, Path] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options of this plugin."""
    parser.addoption("--on-engine", action="store_true", help="give the trainers a model that is an engine")
    parser.addoption("--steps", type=int, help="steps of each training at most")
    parser.addoption("--findings", type=Path, required=True, help="what became of each test")
    parser.addoption("--stand-ins", type=Path, help="folder with the data sets, ORGANIZATION/NAME/CONFIG")


def pytest_configure(config: pytest.Config) -> None:
    """Replace what loads data sets, before the tests import it."""
    _FOLDERS["data"] = config.getoption("--stand-ins")
    datasets.load_dataset = load_dataset
    # Tests of another version may ask for packages that this one does not ask for.
    importlib.import_module("trl.import_utils").__getattr__ = _is_available  # type: ignore[method-assign]
    for name in ("sft", "dpo", "kto", "reward"):
        importlib.import_module(f"trl.trainer.{name}_trainer").__getattr__ = _missing  # type: ignore[method-assign]


def _is_available(name: str) -> Callable[[], bool]:
    package = re.fullmatch("is_(.+)_available", name)
    if package is None:
        raise AttributeError(name)
    return lambda: importlib.util.find_spec(package[1]) is not None


def _missing(name: str) -> Callable[..., Any]:
    """Stand for a function of another version of TRL, so that only the tests that call it cannot run."""
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *_, **__: pytest.skip(f"is not in this version of TRL: {name}")


def load_dataset(name: str, config: str | None = None, split: str | None = None, streaming: bool = False) -> Any:
    """Load a stand-in, as ``datasets.load_dataset`` loads a data set of the Hub."""
    folder = _FOLDERS["data"] / name / str(config)
    if not folder.is_dir():
        pytest.skip(f"needs the network: data set {name}")
    dataset = datasets.load_from_disk(str(folder))
    if streaming:
        dataset = datasets.IterableDatasetDict({key: part.to_iterable_dataset() for key, part in dataset.items()})
    if split is None:
        return dataset
    if "[" in split:
        name, _, rest = split.partition("[")
        start, _, end = rest.rstrip("]").partition(":")
        return dataset[name].select(range(int(start or 0), int(end or len(dataset[name]))))
    return dataset[split]


@pytest.fixture(autouse=True)
def _few_steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """End trainings early."""
    most, kind = request.config.getoption("--steps"), importlib.import_module("trl.trainer.base_config")._BaseConfig
    original = kind.__post_init__

    def post_init(self: Any) -> None:
        if most is not None:
            self.max_steps = most if self.max_steps < 1 else min(most, self.max_steps)
        original(self)

    monkeypatch.setattr(kind, "__post_init__", post_init)


@pytest.fixture(autouse=True)
def _engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if not request.config.getoption("--on-engine"):
        yield
        return
    with on_engine.trainers_on_engines(tmp_path_factory.mktemp("engines")):
        yield


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Note what became of a test."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.when == "call" or report.outcome != "passed":
        with item.config.getoption("--findings").open("a") as file:
            became, reason = _judged(report, call)
            line = {"test": item.nodeid, "became": became, "reason": reason, "seconds": round(call.duration, 1)}
            file.write(json.dumps(line) + "\n")


def _judged(report: Any, call: pytest.CallInfo[None]) -> tuple[str, str]:
    if report.outcome == "passed":
        return "passed", ""
    if report.outcome == "skipped":
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(report, "wasxfail", "")
        return "skipped", text.removeprefix("Skipped: ")
    error: BaseException | None = call.excinfo.value if call.excinfo else None
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    while error is not None:
        if type(error).__module__ == "common.errors":
            return "refused", " ".join(str(error).split())
        if "offline mode" in str(error) or "LocalEntryNotFound" in type(error).__name__:
            return "skipped", f"needs the network: {' '.join(str(error).split())[:160]}"
        error = error.__cause__ or error.__context__
    return "failed", reason[:400]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what has been run."""
    path = config.getoption("--findings")
    done = {json.loads(line)["test"] for line in path.read_text().splitlines()} if path.exists() else set()
    items[:] = [item for item in items if item.nodeid not in done]
