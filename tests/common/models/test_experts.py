"""Which experts are chosen, by use that can be worked out by hand."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.errors import FinetuneError, UserError
from common.models.chosen_experts import ChosenExperts, chosen_count
from common.models.experts import ExpertUsage, LayerUsage, UsageRecorder, most_relevant
from common.models.meta_model import build_meta_model
from tests.helpers.models.families import family_config
from tests.helpers.models.mixtures import mixture_config


def usage(*layers: tuple[float, ...]) -> ExpertUsage:
    return ExpertUsage(
        {f"layer {number}": LayerUsage(tuple(map(int, values)), values) for number, values in enumerate(layers)}
    )


def chosen(found: ExpertUsage, count: int, score: str = "gates") -> list[tuple[int, ...]]:
    return list(most_relevant(found, dict.fromkeys(found.layers, count), score).experts.values())


def test_the_most_relevant_of_each_layer() -> None:
    found = usage((97.0, 1.0, 1.0, 1.0), (20.0, 30.0, 25.0, 25.0))
    assert chosen(found, 1) == [(0,), (1,)]
    assert chosen(found, 2) == [(0, 1), (1, 2)]  # of equally relevant ones the first
    assert chosen(found, 4) == [(0, 1, 2, 3), (0, 1, 2, 3)]
    choice = most_relevant(found, {"layer 0": 1, "layer 1": 3})
    assert choice.experts == {"layer 0": (0,), "layer 1": (1, 2, 3)}
    assert [choice.part(name) for name in choice.experts] == [0.97, 0.8]


def test_by_tokens_and_by_gates() -> None:
    layer = LayerUsage((10, 1), (0.5, 5.0))
    found = ExpertUsage({"a": layer})
    assert chosen(found, 1, "tokens") == [(0,)] and chosen(found, 1, "gates") == [(1,)]
    unused = ExpertUsage({"a": LayerUsage((0, 0), (0.0, 0.0))})
    assert unused.layers["a"].relevance("tokens") == [0.5, 0.5] and chosen(unused, 1) == [(0,)]
    assert ExpertUsage.combined([found, found]).layers["a"] == LayerUsage((20, 2), (1.0, 10.0))


def test_what_cannot_be_is_refused() -> None:
    found = usage((1.0, 2.0))
    with pytest.raises(UserError, match="gates or tokens, not by 'chance'"):
        chosen(found, 1, "chance")
    with pytest.raises(UserError, match="no experts that are fused"):
        UsageRecorder(build_meta_model(family_config("llama")))
    model = build_meta_model(mixture_config("mixtral"))
    recorder = UsageRecorder(model)
    with recorder.recording(), pytest.raises(FinetuneError, match=r"layers\.0\.mlp\.experts is not called with"):
        model.model.layers[0].mlp.experts(torch.zeros(3, 48))


def test_how_many_are_trained() -> None:
    assert [chosen_count(128, share) for share in (0.1, 0.29, 0.3, 1.0, 0.001)] == [12, 37, 38, 128, 1]
    assert chosen_count(100, 0.29) == 29  # which is a little less in floating point


def test_choosing_moves_rows() -> None:
    model = AutoModelForCausalLM.from_config(mixture_config("mixtral"))
    tokens = torch.arange(12).view(1, 12)
    with torch.no_grad():
        before = model(tokens).logits
        weights = {name: value.clone() for name, value in model.named_parameters()}
        chosen = ChosenExperts(model, 0.5)
        assert not chosen.is_chosen and {2, 4} == set(next(iter(chosen.counts.values())))
        with pytest.raises(UserError, match=r"of model.layers.0.mlp.experts, 2 are trained, .* chosen: \[0, 4\]"):
            chosen.choose(dict.fromkeys(chosen.counts, (4, 0)))
        chosen.choose(dict.fromkeys(chosen.counts, (3, 1)))
        for name, whole in chosen.whole_names.items():
            model.get_parameter(name).copy_(weights[whole][[1, 3]])
        assert torch.equal(model(tokens).logits, before)
        for name in chosen.whole_names:
            model.get_parameter(name).mul_(2)
        assert not torch.equal(model(tokens).logits, before)
        merged = chosen.merged(dict(model.named_parameters()), torch.float32, None)
    assert merged.keys() == weights.keys()
    for name, value in merged.items():
        doubled = weights[name].clone()
        if name in chosen.whole_names.values():
            doubled[[1, 3]] *= 2
        assert torch.equal(value, doubled), name
