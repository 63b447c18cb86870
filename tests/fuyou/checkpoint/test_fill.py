"""What is written to a new store: weights, and no moments, which its unwritten space holds."""

from pathlib import Path

import pytest

from fuyou import Engine
from tests.helpers.models.families import family_config

LOW_SHARE = {("bf16", "adamw"): 1.0, ("bf16", "adamw8bit"): 0.5, ("fp32", "adamw"): 0.0, ("fp32", "adamw8bit"): 0.0}


@pytest.mark.parametrize(("dtype", "optimizer"), LOW_SHARE)
def test_moments_of_zero_are_not_written(tmp_path: Path, dtype: str, optimizer: str) -> None:
    with Engine(family_config("llama"), ssd=[tmp_path], dtype=dtype, optimizer=optimizer) as engine:
        records = engine._run.layout.records
        assert engine.created_bytes == sum(record.first_nbytes for record in records)
        parameters = sum(record.parameter_nbytes for record in records)
        assert engine.created_bytes == parameters * (1 + LOW_SHARE[dtype, optimizer])
