"""accelerate's FSDP2 and TRL's trainer with one line more, next to themselves without it, on 2 nodes of 2 ranks.

Losses are equal but for the order of additions: gloo's reduce-scatter has its own order.
"""

from pathlib import Path

import pytest

from tests.helpers.fcdp import loop_cases as cases
from tests.helpers.fcdp.pool import Pool

FOUR = (2, 2)


@pytest.mark.slow
def test_accelerate_trains_and_checkpoints_go_both_ways(pool: Pool, tmp_path: Path) -> None:
    saved = [str(tmp_path / name) for name in ("plain", "ours")]
    plain, ours = (pool.run(FOUR, cases.accelerate_loop, which, 20, saved[which]) for which in (False, True))
    for (losses, _), (expected, _) in zip(ours, plain, strict=True):
        assert losses == pytest.approx(expected, rel=2e-6)
    assert ours[0][1][0] == ours[0][1][1] > 0
    # With Adam's states again, both continue alike from what the other has saved.
    plain, ours = (
        pool.run(FOUR, cases.accelerate_loop, which, 4, "", saved[not which]) for which in (False, True)
    )
    for (losses, _), (expected, _) in zip(ours, plain, strict=True):
        assert losses == pytest.approx(expected, rel=2e-6)


@pytest.mark.slow
def test_sft_trainer_and_checkpoints_go_both_ways(pool: Pool, tmp_path: Path) -> None:
    saved = [str(tmp_path / name) for name in ("plain", "ours")]
    plain, ours = (pool.run(FOUR, cases.sft_trainer, which, 22, saved[which]) for which in (False, True))
    for (losses, _), (expected, _) in zip(ours, plain, strict=True):
        assert len(losses) == 22
        assert losses == pytest.approx(expected, rel=2e-6)
    assert ours[0][1][0] == ours[0][1][1] > 0
    # From what the other has saved after 20 steps, weights, AdamW's states and the place in the data, both continue as
    # the run that was not interrupted.
    for which in (False, True):
        after = f"{saved[not which]}/checkpoint-20"
        for (losses, _), (expected, _) in zip(
            pool.run(FOUR, cases.sft_trainer, which, 22, str(tmp_path / "later"), after), plain, strict=True
        ):
            assert losses == pytest.approx(expected, rel=2e-6)
