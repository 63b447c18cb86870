"""Blocks in pieces are proven like whole ones, and a proof that ought to fail fails."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from common.errors import UserError
from common.models.adapters.options import AdapterOptions
from fuyou.layout.record import Precision
from fuyou.model.blocks import probe
from fuyou.model.open_model import OpenModel
from fuyou.optimizer.gradient_sum import GradientSum
from fuyou.pieces.division import in_pieces
from fuyou.preflight.proof import prove_divided
from tests.helpers.models.small_models import small_config


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss"])
def test_families_train_in_pieces_as_in_memory(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    prove_divided(AutoConfig.for_model(family))


def test_experts_that_a_family_computes_one_by_one_are_cut_where_they_are_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = small_config("longcat_flash")
    prove_divided(config, adapters=AdapterOptions(rank=4).peft_config())
    with pytest.raises(UserError, match="one by one"):
        prove_divided(config)


def test_ranges_hold_each_row_once_of_experts_of_unequal_numbers() -> None:
    opened = OpenModel(
        small_config("longcat_flash"),
        Precision(torch.float32),
        torch.device("cpu"),
        AdapterOptions(rank=4).peft_config(),
    )
    pieces = in_pieces(opened.stack, opened.layout, 1)
    records = [pieces.records[index] for index in pieces.blocks[0]]
    for name in ("gate_up_proj", "down_proj"):
        slots = [slot for record in records for slot in record.parameters if slot.names[0].endswith(name)]
        ranges = sorted(slot.experts for slot in slots if slot.experts is not None)
        whole = opened.stack.model.get_parameter(f"model.layers.0.mlp.experts.{name}")
        assert [row for first, last in ranges for row in range(first, last)] == list(range(len(whole)))


def test_probes_make_nothing_of_adapters_of_such_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        pytest.fail("a block has run with values")

    monkeypatch.setattr(probe, "_on_device", fail)
    adapters = AdapterOptions(rank=4, targets=("all-linear",)).peft_config()
    OpenModel(small_config("longcat_flash"), Precision(torch.float32), torch.device("cpu"), adapters)


def test_a_wrong_gradient_of_some_experts_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    original = GradientSum.add

    def add(self: GradientSum, name: str, gradient: torch.Tensor) -> None:
        original(self, name, gradient * 1.0001 if name.endswith("gate_up_proj[1:2]") else gradient)

    monkeypatch.setattr(GradientSum, "add", add)
    with pytest.raises(UserError, match="gate_up_proj"):
        prove_divided(AutoConfig.for_model("qwen3_moe"))
