"""Which steps mark which groups, while parameters come and go."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import fcdp
from fcdp.cache.staleness import OptimizerHooks, StaleCacheError, StalenessCheck
from fcdp.grouping import ParameterGroup
from tests.helpers.fcdp.pool import Pool


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


def _check_as_on_cuda(topology: fcdp.Topology, stale_rank: int) -> list[bool]:
    """Whether this rank is stopped before each of two steps, the parameters of one rank being others in the first."""
    check = StalenessCheck(torch.device("cpu"), topology.mesh.get_group(), at_once=False)
    module = nn.Linear(2, 2, bias=False)
    group = ParameterGroup("", [module], [(module, "weight")], 0)
    stopped = []
    for step in range(2):
        parameters = torch.arange(4.0)
        check.filled(group, parameters)
        if topology.rank == stale_rank and step == 0:
            parameters[1] += 1
        check.check(group, parameters, None)
        try:
            check.raise_if_found()
            stopped.append(False)
        except StaleCacheError:
            stopped.append(True)
    return stopped


@pytest.mark.parametrize("stale_rank", [0, 3, -1])
def test_what_one_rank_finds_stops_all_of_them(pool: Pool, stale_rank: int) -> None:
    found = stale_rank >= 0
    assert pool.run((2, 2), _check_as_on_cuda, stale_rank) == [[found, False]] * 4


def test_a_step_without_a_hit_exchanges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *arguments: calls.append(arguments))
    check = StalenessCheck(torch.device("cpu"), Mock(), at_once=False)
    group = ParameterGroup("", [], [], 0)
    check.filled(group, torch.zeros(2))
    check.raise_if_found()
    assert not calls
    for _ in range(2):
        check.check(group, torch.zeros(2), None)
    check.raise_if_found()
    check.raise_if_found()
    assert len(calls) == 1
