"""Which parameters travel together, without any process."""

import peft
import pytest
import torch
from torch import nn

from fcdp.grouping import ParameterGroup, find_units, split_units, whole_units
from tests.helpers.fcdp.cases import Case, make_model


def _described(groups: list[ParameterGroup]) -> dict[str, tuple[bool, int]]:
    """Name: (has a trainable parameter, number of parameters)."""
    return {group.name: (group.trainable, len(group.places)) for group in groups}


def _each_once(model: nn.Module, groups: list[ParameterGroup]) -> bool:
    taken = [id(parameter) for group in groups for parameter in group.registered()]
    return sorted(taken) == sorted({id(parameter) for parameter in model.parameters()})


def test_units_of_a_model_in_forward_order() -> None:
    units = find_units(make_model(Case()))
    assert [unit.name for unit in units] == ["model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head", ""]
    assert [unit.keep_after_forward for unit in units] == [False, False, False, True, True]


def test_tied_embeddings_stay_with_the_root() -> None:
    model = make_model(Case(tied=True))
    groups = split_units(find_units(model), "block")
    assert _described(groups) == {"model.layers.0": (True, 9), "model.layers.1": (True, 9), "root": (True, 2)}
    assert _each_once(model, groups)


def test_frozen_and_trainable_never_share_a_group() -> None:
    model = make_model(Case(lora=True))
    prefix = "base_model.model.model"
    assert _described(split_units(find_units(model), "block")) == {
        f"{prefix}.embed_tokens": (False, 1), f"{prefix}.layers.0/trainable": (True, 6),
        f"{prefix}.layers.0": (False, 9), f"{prefix}.layers.1/trainable": (True, 6), f"{prefix}.layers.1": (False, 9),
        "base_model.model.lm_head": (False, 1), "root": (False, 1),
    }  # fmt: skip
    in_model = split_units(find_units(model), "model")
    assert _described(in_model)["model/trainable"] == (True, 12)
    assert [group.trainable for group in in_model].count(True) == 1
    assert _each_once(model, in_model)


def test_plain_groups_are_units() -> None:
    model = make_model(Case(lora=True))
    groups = whole_units(find_units(model))
    assert len(groups) == 5
    assert _each_once(model, groups)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("adapters", ["block", "model"])
def test_adapters_on_embeddings_leave_the_frozen_base_alone(adapters: str, tied: bool) -> None:
    """Their matrices are in a ParameterDict, which is never called: the module around it also holds the base."""
    model = make_model(Case(tied=tied))
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"]))
    groups = split_units(find_units(model), adapters)  # type: ignore[arg-type]
    for group in groups:
        assert len({parameter.requires_grad for parameter in group.registered()}) == 1, group.name
    assert _each_once(model, groups)


def test_a_module_with_both_kinds_counts_as_trainable() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.inner = nn.Linear(3, 3)
            self.biased = nn.Linear(3, 3)

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.unused = nn.ModuleList()

    model = Stack()
    for block in model.blocks:
        block.inner.requires_grad_(False)
        block.biased.weight.requires_grad_(False)
    groups = split_units(find_units(model), "block")
    assert _described(groups) == {
        "blocks.0/frozen": (False, 2),
        "blocks.0/trainable": (True, 3),
        "blocks.1/frozen": (False, 2),
        "blocks.1/trainable": (True, 3),
    }
    assert _each_once(model, groups)
