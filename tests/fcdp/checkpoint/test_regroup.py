"""A run continues with other ranks and nodes, as the run that never changed; crash-safely; or says what is missing."""

from pathlib import Path
from typing import Any

import pytest
import torch

from common.models.adapters.options import ALL_LINEAR, AdapterOptions
from tests.helpers.fcdp import engine_cases as cases
from tests.helpers.fcdp.engine_cases import Outcome, Run
from tests.helpers.fcdp.pool import Pool

#: Layouts, one after another, with which ranks look at the drives of ranks that are gone.
CHANGES: list[tuple[tuple[int, int] | None, tuple[tuple[int, int], ...]]] = [
    ((2, 1), ()), (None, ((0, 1),)), ((1, 2), ()), ((2, 2), ()), ((2, 1), ((0, 2), (1, 3))),
]  # fmt: skip


def go_on(pool: Pool, layout: tuple[int, int] | None, run: Run) -> list[Outcome]:
    """Train as this many ranks, or as one alone."""
    return [cases.train(None, run)] if layout is None else pool.run(layout, cases.train, run)


@pytest.mark.parametrize(("dtype", "ssds", "options", "changes"), [
    ("bf16", 2, {"host_cache": 0}, CHANGES[:3]),
    ("fp32", 1, {"adapters": AdapterOptions(4, 8.0, 0.0, (ALL_LINEAR,)), "frozen_dtype": "int8"}, CHANGES),
])  # fmt: skip
@pytest.mark.slow
def test_other_ranks_continue_as_if_nothing_had_changed(
    dtype: str, ssds: int, options: dict[str, Any], changes: Any, model: str, pool: Pool, tmp_path: Path
) -> None:
    options = {"dtype": dtype, **options}
    alone = cases.train(
        None, Run(model, tmp_path / "alone", 2 * len(changes), options={**options, "micro_batch": 2})
    )
    losses: list[float] = []
    exact = True
    for number, (layout, leave) in enumerate(changes):
        micro_batch = 1 if layout == (2, 2) else 2
        run = Run(
            model, tmp_path / "run", 2 * number + 2, ssds=ssds, leave=leave,
            options={**options, "micro_batch": micro_batch, "resume": number > 0},
        )  # fmt: skip
        ranks = go_on(pool, layout, run)
        assert {rank.first for rank in ranks} == {2 * number}
        losses += ranks[0].losses
        exact = exact and layout != (2, 2)  # four ranks add up in another order
        if exact:
            assert losses == alone.losses[: len(losses)]
        assert losses == pytest.approx(alone.losses[: len(losses)], rel=1e-6)
    for name, master in alone.masters.items():
        if exact:
            assert torch.equal(ranks[0].masters[name], master), name
        torch.testing.assert_close(ranks[0].masters[name], master, rtol=1e-4, atol=1e-6, msg=name)
    left = {path.relative_to(tmp_path / "run").parts[0] for path in (tmp_path / "run").rglob("manifest.json")}
    assert left == {f"rank{rank}" for rank in range(len(ranks))}
    assert not list((tmp_path / "run").rglob("*.new"))
