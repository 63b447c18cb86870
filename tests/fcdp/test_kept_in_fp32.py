"""Ranks in memory gather in one dtype, and refuse models that have two."""

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from common.errors import UserError
from common.models.miniature import miniature
from fcdp.model import ClusterModel, TrainerConfig

NO_TOPOLOGY: Any = None  # Which is needed later


def test_parameters_that_a_family_keeps_in_fp32_are_refused_in_bf16() -> None:
    config = miniature(CONFIG_MAPPING["hy_v4"]())
    with pytest.raises(UserError, match=r"keeps .* in fp32, which ranks in memory would round: give .*fp32"):
        ClusterModel.open(config, NO_TOPOLOGY, TrainerConfig(dtype="bf16"), None)
