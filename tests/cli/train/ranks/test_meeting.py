"""Which device a rank computes on."""

import pytest
import torch

from cli.options.settings import Settings
from cli.train import meeting
from common.errors import UserError


def test_a_rank_that_does_not_see_its_gpu_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under ``srun --gpus-per-task``, which gives each rank a single GPU."""
    chosen: list[int] = []
    monkeypatch.setattr(meeting, "usable_gpus", lambda: ["a GPU"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert meeting.device_of(Settings(model="m"), 0) == torch.device("cuda", 0) and chosen == [0]
    with pytest.raises(UserError, match=r"Rank 1 .* computes on GPU 1, and sees 1 GPUs"):
        meeting.device_of(Settings(model="m"), 1)
