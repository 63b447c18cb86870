"""Which experts are chosen, by use that can be worked out by hand."""

from itertools import product

import pytest
import torch

from common.errors import FinetuneError, UserError
from common.models.experts import ExpertUsage, LayerUsage, UsageRecorder, choose_experts
from common.models.meta_model import build_meta_model
from tests.helpers.models.families import family_config
from tests.helpers.models.mixtures import mixture_config


def usage(*layers: tuple[float, ...]) -> ExpertUsage:
    return ExpertUsage(
        {f"layer {number}": LayerUsage(tuple(map(int, values)), values) for number, values in enumerate(layers)}
    )


def chosen(found: ExpertUsage, fraction: float, score: str = "gates") -> list[tuple[int, ...]]:
    return list(choose_experts(found, fraction, score).experts.values())


def test_a_layer_whose_tokens_spread_gets_more() -> None:
    found = usage((97.0, 1.0, 1.0, 1.0), (20.0, 30.0, 25.0, 25.0))
    assert chosen(found, 0.5) == [(0,), (1, 2, 3)]  # 0.97, and 0.8 with three
    assert chosen(found, 1.0) == [(0, 1, 2, 3), (0, 1, 2, 3)]
    assert chosen(found, 0.01) == [(0,), (1,)]  # at least one each
    assert chosen(found, 0.625) == [(0,), (0, 1, 2, 3)]
    assert chosen(found, 0.75) == [(0, 1), (0, 1, 2, 3)]


def test_no_other_choice_of_as_many_has_more_where_it_has_least() -> None:
    """Against all choices that there are."""
    generator = torch.Generator().manual_seed(0)
    for fraction in (0.3, 0.5, 0.8):
        found = usage(*(tuple(torch.rand(4, generator=generator).tolist()) for _ in range(3)))
        shares = [layer.relevance("gates") for layer in found.layers.values()]
        budget = int(fraction * 12)
        least = min(
            sum(one[index] for index in best) for one, best in zip(shares, chosen(found, fraction), strict=True)
        )
        sizes = (counts for counts in product(range(1, 5), repeat=3) if sum(counts) <= budget)
        best = max(
            min(sum(sorted(one, reverse=True)[:n]) for one, n in zip(shares, counts, strict=True)) for counts in sizes
        )
        assert least == pytest.approx(best)
        assert sum(map(len, chosen(found, fraction))) <= budget


def test_by_tokens_and_by_gates() -> None:
    layer = LayerUsage((10, 1), (0.5, 5.0))
    found = ExpertUsage({"a": layer})
    assert chosen(found, 0.5, "tokens") == [(0,)] and chosen(found, 0.5, "gates") == [(1,)]
    unused = ExpertUsage({"a": LayerUsage((0, 0), (0.0, 0.0))})
    assert unused.layers["a"].relevance("tokens") == [0.5, 0.5] and chosen(unused, 0.5) == [(0,)]
    assert ExpertUsage.combined([found, found]).layers["a"] == LayerUsage((20, 2), (1.0, 10.0))


def test_what_cannot_be_is_refused() -> None:
    found = usage((1.0, 2.0))
    for fraction in (0.0, -1.0, 1.1):
        with pytest.raises(UserError, match="more than 0 and at most 1"):
            choose_experts(found, fraction)
    with pytest.raises(UserError, match="gates or tokens, not by 'chance'"):
        choose_experts(found, 0.5, "chance")
    with pytest.raises(UserError, match="no experts that are fused"):
        UsageRecorder(build_meta_model(family_config("llama")))
    model = build_meta_model(mixture_config("mixtral"))
    recorder = UsageRecorder(model)
    with recorder.recording(), pytest.raises(FinetuneError, match=r"layers\.0\.mlp\.experts is not called with"):
        model.model.layers[0].mlp.experts(torch.zeros(3, 48))
