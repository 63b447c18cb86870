"""A run that continues computes as many sequences at once as it did, however much memory there is now."""

from pathlib import Path

import pytest

from tests.helpers.engines import ROWS, batches, directories, engine, train
from tests.helpers.twin import tiny_configs


def test_a_run_that_continues_keeps_its_micro_batch(tmp_path: Path) -> None:
    feed, (whole, part) = batches(4, packed=True), directories(tmp_path, 2)
    with engine(tiny_configs()["llama"], [whole], micro_batch=2) as trained:
        uninterrupted = train(trained, feed)
    with engine(tiny_configs()["llama"], [part], micro_batch=2) as trained:
        first = train(trained, feed[:2])
    with engine(tiny_configs()["llama"], [part], resume=True) as trained:
        assert trained.memory_plan.batch.micro_rows == 2, "all four would fit"
        assert first + train(trained, feed[2:]) == uninterrupted


@pytest.mark.parametrize("options", [{"micro_batch": 1}, {"batch_shape": (ROWS, 16)}])
def test_what_is_requested_and_other_batches_decide_otherwise(options: dict, tmp_path: Path) -> None:
    ssd = directories(tmp_path, 1)
    with engine(tiny_configs()["llama"], ssd, micro_batch=2) as trained:
        train(trained, batches(1, packed=True))
    with engine(tiny_configs()["llama"], ssd, resume=True, **options) as trained:
        assert trained.memory_plan.batch.micro_rows == options.get("micro_batch", ROWS)
