"""An exception anywhere in a step: the engine is as before the call, or says that the step must be abandoned."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import fuyou
from common.errors import FinetuneError
from tests.helpers.small_engine import BATCH, small_engine, train

PRODUCT = tuple(str(Path(fuyou.__file__).parents[1] / package) for package in ("fuyou", "common"))
Call = tuple[str, str, int]
"""A call: file, function, and which of its calls in a step."""


class Thrown(BaseException):
    """What no code of the product catches by its type."""


class Calls:
    """Counts the calls of the product's functions in this thread, and raises in one of them."""

    def __init__(self, target: Call | None = None):
        self.seen: Counter[tuple[str, str]] = Counter()
        self._target = target

    @contextmanager
    def watched(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(before)

    def _called(self, frame: FrameType, *_: object) -> None:
        code = frame.f_code
        if code.co_filename.startswith(PRODUCT):
            name = code.co_filename, code.co_qualname
            self.seen[name] += 1
            if self._target == (*name, self.seen[name]):
                raise Thrown


def step(engine: fuyou.Engine) -> float:
    loss = engine(**BATCH).loss
    loss.backward()
    engine.step()
    return loss.item()


def evaluated(engine: fuyou.Engine) -> float:
    return engine.eval_loss(**BATCH)


def own_loss(engine: fuyou.Engine) -> float:
    out = engine.tokens(**BATCH)
    loss = -out.log_probs.sum() / out.mask.sum()
    engine.backward(loss)
    engine.step()
    return loss.item()


def calls_in(engine: fuyou.Engine, action: Any) -> list[Call]:
    """Return the first and the last call of every function in an action, in the order of the first ones."""
    calls = Calls()
    with calls.watched():
        action(engine)
    return [(*name, number) for name, count in calls.seen.items() for number in sorted({1, count})]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "deferred": {"deferred_fraction": 0.5, "commit_every": 2},
    "speculation": {"max_grad_norm": 0.5, "clip_by": "speculation"},
}


def check_calls(
    tmp_path: Path, action: Any, options: dict[str, Any], chosen: Callable[[list[Call]], list[Call]]
) -> Counter[str]:
    """Throw at the chosen calls of an action; return how often it ended in which way."""
    ways: Counter[str] = Counter()
    (tmp_path / "twin").mkdir()
    (tmp_path / "run").mkdir()
    steps = 4
    with small_engine(tmp_path / "twin", lr=1e-3, **options) as engine:
        expected = train(engine, steps)
    engine = small_engine(tmp_path / "run", lr=1e-3, **options)
    train(engine, 2)
    calls = chosen(calls_in(engine, action))
    engine.close()
    for call in calls:
        engine = small_engine(tmp_path / "run", lr=1e-3, overwrite=True, **options)
        train(engine, 2)
        thrower = Calls(call)
        raised, refusal, before = None, None, 0
        try:
            with thrower.watched():
                action(engine)
        except Thrown as error:
            raised, before = error, engine.step_count
        try:
            assert raised is None or step(engine) == expected[before], call
        except FinetuneError as error:
            refusal = str(error)
        if refusal is not None:
            assert "engine.abandon()" in refusal, call
            engine.abandon()
        ways["not raised" if raised is None else "as before" if refusal is None else "abandoned"] += 1
        number = engine.step_count
        assert number <= 3, call
        assert train(engine, steps - number) == expected[number:], (call, refusal)
        engine.close()
    return ways


@pytest.mark.parametrize(("action", "options", "every"), [
    (step, "plain", 150),
    *(
        pytest.param(action, options, 100, marks=pytest.mark.slow)
        for action, options in (
            (step, "deferred"),
            (step, "speculation"),
            (evaluated, "plain"),
            (own_loss, "plain"),
        )
    ),
])  # fmt: skip
def test_an_exception_at_any_call(action: Any, options: str, every: int, tmp_path: Path) -> None:
    ways = check_calls(tmp_path, action, OPTIONS[options], lambda calls: calls[::every])
    print(ways)
    assert ways["as before"] + ways["abandoned"] > 3, ways


def test_an_exception_while_a_step_ends(tmp_path: Path) -> None:
    """Its commit then waits for an end that never comes: abandon() must not wait for that commit."""
    names = ("Commits.end", "Executor.finish", "Steps._report")

    def chosen(calls: list[Call]) -> list[Call]:
        return [{call[1]: call for call in calls}[name] for name in names]  # the last call of each

    assert check_calls(tmp_path, step, {}, chosen) == {"abandoned": len(names)}
