"""The out-of-core engine over a process group equals one rank that computes the same micro-batches."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.fcdp import engine_cases as cases
from tests.fcdp.engine_cases import Run
from tests.fcdp.pool import Pool


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Sizes that divide by nothing: every record needs padding, and slices cut parameters."""
    config = LlamaConfig(
        vocab_size=cases.VOCABULARY, hidden_size=36, intermediate_size=52, num_hidden_layers=3, num_attention_heads=3,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("layout", [(2, 1), (1, 2)])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_two_ranks_equal_one(layout: tuple[int, int], dtype: str, model: str, pool: Pool, tmp_path: Path) -> None:
    options = {"dtype": dtype, "host_cache": 0, "micro_batch": 2}
    alone = cases.train(None, Run(model, tmp_path / "alone", options=options))
    ranks = pool.run(layout, cases.train, Run(model, tmp_path / "ranks", options=options))
    for rank in ranks:
        assert rank.losses == alone.losses
        assert rank.norms == pytest.approx(alone.norms, rel=1e-12)
    for name, master in alone.masters.items():
        assert torch.equal(ranks[0].masters[name], master), name
