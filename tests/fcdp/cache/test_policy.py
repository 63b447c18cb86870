"""What is kept of gathered parameters, by strategy and by how much host memory there is."""

from dataclasses import replace

from torch import nn

from fcdp.cache.cached_shards import CachedGroup, all_cached, fit_into
from fcdp.grouping import ParameterGroup
from fcdp.strategy.mesh import Levels
from fcdp.strategy.strategy import Routes, parse_strategy


def _group(trainable: bool, cell: int, *, stays: bool = False) -> ParameterGroup:
    module = nn.Linear(2, 2, bias=False).requires_grad_(trainable)
    group = ParameterGroup("", [module], [(module, "weight")], 0, kept_after_forward=stays)
    group.cell_numel, group.cell_bytes = cell, 2 * cell
    return group


GROUPS = [_group(True, 100), _group(False, 300), _group(True, 512, stays=True)]


def _kept(strategy: str, levels: Levels) -> list[CachedGroup]:
    return all_cached(Routes.of(parse_strategy(strategy).on(levels)), GROUPS)


def test_a_share_has_the_cells_of_all_ranks_with_the_same_place() -> None:
    levels = Levels((2, 4))
    assert [(one.nbytes, one.in_host, one.block) for one in _kept("fcdp", levels)] == [
        (800, True, 2), (2400, True, 2), (4096, True, 2),
    ]  # fmt: skip
    assert [one.in_host for one in _kept("paro-iig", levels)] == [False] * 3
    for name in ("zero3", "zero1", "mics"):
        assert _kept(name, levels) == [], "P is sharded as OS is, or FSDP2 keeps it whole"
    assert [one.nbytes for one in _kept("fcdp", Levels((1, 4)))] == [800, 2400, 4096], (
        "all of P on nodes of one rank"
    )


def test_second_shards_are_of_groups_that_the_backward_gathers_and_may_be_quantized() -> None:
    exact = _kept("zero++", Levels((2, 4)))
    assert [(one.group, one.nbytes, one.is_secondary, one.bits) for one in exact] == [
        (GROUPS[0], 800, True, None), (GROUPS[1], 2400, True, None),
    ]  # fmt: skip
    both = _kept("zero-topo", Levels((2, 2, 2)))
    assert [(one.is_secondary, one.bits, one.in_host) for one in both] == [(False, None, False)] * 3 + [
        (True, 8, False)
    ] * 2
    assert both[3].nbytes == 4 * (256 + 4), "100 elements are one block of int8 and its scale"


def test_a_budget_of_host_memory_goes_to_frozen_groups_first() -> None:
    wanted = _kept("I/I/G+host", Levels((2, 4)))
    assert fit_into(None, wanted) == wanted
    assert fit_into(2400, wanted) == [wanted[1]]
    assert fit_into(3300, wanted) == [wanted[0], wanted[1]]
    assert fit_into(0, wanted) == []
    on_device = [replace(one, in_host=False) for one in wanted]
    assert fit_into(0, on_device) == on_device
