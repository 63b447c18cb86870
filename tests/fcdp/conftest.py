"""What several tests of this folder share: ranks, and a checkpoint."""

from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.helpers.fcdp.engine_cases import VOCABULARY
from tests.helpers.fcdp.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Started as they are needed, the first time."""
    ranks = Pool()
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Sizes that divide by nothing: every record needs padding, and slices cut parameters."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=36, intermediate_size=52, num_hidden_layers=3, num_attention_heads=3,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)
