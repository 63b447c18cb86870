"""Ranks out of core whose blocks are in pieces equal one rank whose blocks are whole, bit for bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from common.models.adapters.options import ALL_LINEAR, AdapterOptions
from tests.helpers.fcdp import engine_cases as cases
from tests.helpers.fcdp.engine_cases import Outcome, Run
from tests.helpers.fcdp.pool import Pool

ADAPTERS = AdapterOptions(4, 8.0, 0.0, (ALL_LINEAR,))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Sizes that divide by nothing, so that ranks' slices cut experts and pieces end anywhere."""
    config = Qwen3MoeConfig(
        vocab_size=cases.VOCABULARY, hidden_size=40, intermediate_size=52, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, head_dim=12, moe_intermediate_size=24, num_experts=5, num_experts_per_tok=2,
        max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("mixture")
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(("layout", "family", "dtype", "options"), [
    ((2, 1), "model", "bf16", {"piece_size": "6KiB", "host_cache": 0}),
    ((2, 1), "mixture", "fp32", {"piece_size": "20KiB", "max_grad_norm": 0.5}),
    ((2, 1), "mixture", "bf16", {"piece_size": "10KiB", "host_cache": 0, "adapters": ADAPTERS}),
    ((1, 2), "mixture", "fp32", {"piece_size": "20KiB", "frozen_dtype": "nf4", "adapters": ADAPTERS}),
])  # fmt: skip
@pytest.mark.slow
def test_two_ranks_equal_one_with_whole_blocks(
    layout: tuple[int, int], family: str, dtype: str, options: dict[str, Any], pool: Pool, tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """Killed in the middle of a commit, and continued with another size of pieces, which does not count."""
    options = {"dtype": dtype, "micro_batch": 2, **options}
    run = Run(request.getfixturevalue(family), tmp_path / "ranks", 3, options=options)
    alone = whole_and_alone(run, tmp_path)
    begun = pool.run(layout, cases.train, run)
    cases.set_back(run.folder, 1)
    ended = pool.run(layout, cases.train, replace(run, steps=5, options={**options, **ANOTHER_SIZE}))
    check([begun, ended], alone)
    assert {rank.first for rank in ended} == {2}


@pytest.mark.slow
def test_other_ranks_continue_with_the_same_pieces(mixture: str, pool: Pool, tmp_path: Path) -> None:
    """Two nodes, then one, then two ranks of one node, of which the second has drives that held nothing."""
    options = {"dtype": "bf16", "micro_batch": 2, "piece_size": "10KiB", "host_cache": 0}
    run = Run(mixture, tmp_path / "ranks", 1, options=options)
    alone = whole_and_alone(run, tmp_path)
    again = replace(run, options={**options, **ANOTHER_SIZE})
    outcomes = [
        pool.run((2, 1), cases.train, run),
        [cases.train(None, replace(again, steps=3, leave=((0, 1),)))],
        pool.run((1, 2), cases.train, replace(again, steps=5)),
    ]
    check(outcomes, alone)
    assert [ranks[0].first for ranks in outcomes] == [0, 1, 3]


ANOTHER_SIZE = {"resume": True, "piece_size": "9KiB"}
"""Which does not count."""


def whole_and_alone(run: Run, folder: Path) -> Outcome:
    """Five steps of one rank whose blocks are whole."""
    options = {name: value for name, value in run.options.items() if name != "piece_size"}
    return cases.train(None, replace(run, folder=folder / "alone", steps=5, options=options))


def check(outcomes: list[list[Outcome]], alone: Outcome) -> None:
    """All that ranks have come to, one life after another, is what ``alone`` has."""
    for rank in (rank for ranks in outcomes for rank in ranks):
        assert rank.pieces == outcomes[0][0].pieces > 2
        assert rank.counted == rank.scheduled
        assert rank.losses == alone.losses[rank.first :][: len(rank.losses)]
        assert rank.norms == pytest.approx(alone.norms[rank.first :][: len(rank.norms)], rel=1e-12)
    for name, master in alone.masters.items():
        assert torch.equal(outcomes[-1][0].masters[name], master), name
