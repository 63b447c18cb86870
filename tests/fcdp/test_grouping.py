"""Which parameters travel together, without any process."""

import peft
import pytest
from torch import nn

from fcdp.grouping import ParameterGroup, find_units, split_units
from tests.helpers.fcdp.cases import Case, make_model


def _described(groups: list[ParameterGroup]) -> dict[str, tuple[bool, int]]:
    """Name: (has a trainable parameter, number of parameters)."""
    return {group.name: (group.trainable, len(group.places)) for group in groups}


def _each_once(model: nn.Module, groups: list[ParameterGroup]) -> bool:
    taken = [id(parameter) for group in groups for parameter in group.registered()]
    return sorted(taken) == sorted({id(parameter) for parameter in model.parameters()})


def test_frozen_and_trainable_never_share_a_group() -> None:
    model = make_model(Case(lora=True))
    prefix = "base_model.model.model"
    assert _described(split_units(find_units(model))) == {
        f"{prefix}.embed_tokens": (False, 1), f"{prefix}.layers.0/trainable": (True, 6),
        f"{prefix}.layers.0": (False, 9), f"{prefix}.layers.1/trainable": (True, 6), f"{prefix}.layers.1": (False, 9),
        "base_model.model.lm_head": (False, 1), "root": (False, 1),
    }  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
def test_adapters_on_embeddings_leave_the_frozen_base_alone(tied: bool) -> None:
    """Their matrices are in a ParameterDict, which is never called: the module around it also holds the base."""
    model = make_model(Case(tied=tied))
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"]))
    groups = split_units(find_units(model))
    for group in groups:
        assert len({parameter.requires_grad for parameter in group.registered()}) == 1, group.name
    assert _each_once(model, groups)
