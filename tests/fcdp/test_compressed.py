"""Frozen weights in a checkpoint's own bytes among ranks: each keeps its slice of the bytes, all compute the same."""

from pathlib import Path

import pytest
import torch

from common.models.adapters.options import ALL_LINEAR, AdapterOptions
from tests.common.models.checkpoint.compressed.writing import compress
from tests.helpers.fcdp import engine_cases as cases
from tests.helpers.fcdp.engine_cases import Run
from tests.helpers.fcdp.pool import Pool


def test_ranks_share_the_bytes_and_others_continue(model: str, pool: Pool, tmp_path: Path) -> None:
    """Two ranks of a node equal one rank; then one continues alone, with the bytes of both."""
    directory = str(tmp_path / "fp8")
    twin = str(compress(Path(model), tmp_path / "fp8", "fp8"))
    adapters = AdapterOptions(4, 8.0, 0.0, (ALL_LINEAR,))
    options = {"dtype": "bf16", "micro_batch": 2, "host_cache": 0, "adapters": adapters}
    alone = cases.train(None, Run(twin, tmp_path / "alone", 4, options=options))
    run = Run(directory, tmp_path / "run", 2, options=options)
    ranks = pool.run((1, 2), cases.train, run)
    for rank in ranks:
        assert rank.losses == alone.losses[:2]
        assert rank.norms == pytest.approx(alone.norms[:2], rel=1e-12)
        assert rank.counted == rank.scheduled
    sizes = [
        sum(file.stat().st_size for file in (run.folder / f"rank{one}").rglob("weights.frozen"))
        for one in (0, 1)
    ]
    last = Run(directory, run.folder, 4, leave=((0, 1),), options={**options, "resume": True})
    ended = cases.train(None, last)
    assert ended.first == 2 and ended.losses == alone.losses[2:]
    for name, master in alone.masters.items():
        assert torch.equal(ended.masters[name], master), name
    whole = sum(file.stat().st_size for file in (run.folder / "rank0").rglob("weights.frozen"))
    assert sizes[0] == sizes[1] and whole <= sum(sizes)
