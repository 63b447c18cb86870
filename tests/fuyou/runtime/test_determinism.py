"""Deterministic kernels are requested while a run is open, and only then."""

from pathlib import Path

import pytest
import torch

from fuyou.runtime.device import deterministic_algorithms
from tests.helpers.engines import batches, directories, engine
from tests.helpers.twin import tiny_configs


@pytest.mark.parametrize("before", [False, True])
def test_what_was_requested_before_comes_back(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    torch.use_deterministic_algorithms(before, warn_only=True)
    try:
        with deterministic_algorithms():
            assert torch.are_deterministic_algorithms_enabled()
            assert not torch.is_deterministic_algorithms_warn_only_enabled(), (
                "warnings alone leave attention as it is"
            )
            assert not torch.utils.deterministic.fill_uninitialized_memory
        assert torch.are_deterministic_algorithms_enabled() == before
        assert torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_run_computes_the_same_numbers_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    ssd, losses = directories(tmp_path, 1), []
    for deterministic in (False, True):
        with engine(tiny_configs()["llama"], ssd, deterministic=deterministic, overwrite=True) as trained:
            assert torch.are_deterministic_algorithms_enabled() == deterministic
            losses.append([_loss(trained, batch) for batch in batches(2, packed=True)])
    assert not torch.are_deterministic_algorithms_enabled()
    assert losses[0] == losses[1]


def _loss(trained, batch: dict[str, torch.Tensor]) -> float:
    loss = trained(**batch).loss
    loss.backward()
    trained.step()
    return loss.item()
