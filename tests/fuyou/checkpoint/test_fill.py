"""What is written to a new store: weights, and no moments, which its unwritten space holds."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fuyou import Engine
from tests.helpers.models.families import family_config

LOW_SHARE = {
    ("bf16", "adamw"): 1.0,
    ("bf16", "adamw8bit"): 0.5,
    ("fp32", "adamw"): 0.0,
    ("fp32", "adamw8bit"): 0.0,
}


@pytest.mark.parametrize(("dtype", "optimizer"), LOW_SHARE)
def test_moments_of_zero_are_not_written(tmp_path: Path, dtype: str, optimizer: str) -> None:
    with Engine(family_config("llama"), ssd=[tmp_path], dtype=dtype, optimizer=optimizer) as engine:
        records = engine._run.layout.records
        assert engine.created_bytes == sum(record.first_nbytes for record in records)
        parameters = sum(record.parameter_nbytes for record in records)
        assert engine.created_bytes == parameters * (1 + LOW_SHARE[dtype, optimizer])


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_a_checkpoint_in_bf16_fills_a_store_as_the_same_numbers_in_fp32(
    tmp_path: Path, optimizer: str
) -> None:
    """Numbers of the record's dtype are not split, as they have no low bits."""
    model = AutoModelForCausalLM.from_config(family_config("llama")).to(torch.bfloat16)
    with torch.no_grad():
        model.model.norm.weight[:4] = torch.tensor([float("inf"), -0.0, 3e38, 1e-40])
    stores = []
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype)
        (tmp_path / name).mkdir()
        model.to(dtype).save_pretrained(tmp_path / f"{name}-model")
        with Engine(
            tmp_path / f"{name}-model", ssd=[tmp_path / name], dtype="bf16", optimizer=optimizer
        ) as engine:
            stores.append((tmp_path / name / "fuyou-run" / "weights.0").read_bytes())
            values = dict(engine.named_parameters())
        assert torch.equal(
            values["model.norm.weight"].to(torch.bfloat16), model.model.norm.weight.to(torch.bfloat16)
        )
    assert stores[0] == stores[1]
