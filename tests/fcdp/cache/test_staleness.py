"""Which steps mark which groups, while parameters come and go."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fcdp.cache.staleness import OptimizerHooks
from fcdp.grouping import ParameterGroup


class Owner:
    """Hears of optimizer steps, as :class:`fcdp.sharding.Sharding` does."""

    def __init__(self) -> None:
        self.heard = 0

    def hear(self) -> None:
        self.heard += 1


@pytest.fixture
def watched() -> Iterator[tuple[nn.Linear, ParameterGroup, OptimizerHooks]]:
    module, owner = nn.Linear(2, 2, bias=False), Owner()
    group = ParameterGroup("", [module], [(module, "weight")], 0)
    watch = OptimizerHooks([group], weakref.WeakMethod(owner.hear), weakref.WeakMethod(owner.hear))
    yield module, group, watch
    watch.close()


def step(parameter: nn.Parameter) -> None:
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=1.0).step()


def test_a_parameter_that_was_replaced_is_let_go(watched: Any) -> None:
    module, group, _ = watched
    step(module.weight)
    assert group.dirty
    old = weakref.ref(module.weight)
    module.weight, group.dirty = nn.Parameter(torch.zeros(2, 2)), False
    step(module.weight)
    assert group.dirty
    gc.collect()
    assert old() is None


def test_a_stranger_at_the_address_of_one_that_is_gone_marks_nothing(watched: Any) -> None:
    module, group, _ = watched
    addresses, group.dirty = set(), False
    for _ in range(50):  # each is known once, then gone
        module.weight = nn.Parameter(torch.zeros(2, 2))
        step(module.weight)
        addresses.add(id(module.weight))
    group.dirty, strangers = False, [nn.Parameter(torch.zeros(2, 2)) for _ in range(200)]
    assert any(id(stranger) in addresses for stranger in strangers), "no address has come again: the test shows nothing"
    for stranger in strangers:
        step(stranger)
    assert not group.dirty
