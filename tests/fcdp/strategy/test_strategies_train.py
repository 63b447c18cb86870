"""Every strategy of the space trains as plain FSDP2 does, sends across nodes what the planner's formula says, and
launches its collectives in one order on all ranks."""

from math import prod

import pytest

from fcdp.strategy.strategy import PARO, PRESETS
from tests.helpers.fcdp.pool import Pool
from tests.helpers.fcdp.recorder import Launch, check_same_order
from tests.helpers.fcdp.strategy_cases import Run, Trained, train_all, train_under_switches

REFERENCE = "fsdp2"
TWO_LEVELS = [
    *(f"paro-{scopes.lower()}" for scopes in PARO),
    *("ddp", "zero1", "zero2", "zero3", "mics", "zero++-exact", "fcdp", "fcdp-iig"),
    *("I/G/G+device", "I/I/G+host", "G/G/G+host+second"),
]
THREE_LEVELS = [
    *("zero3", "zero-topo-exact", "pair/pair/node", "pair/G/G+host", "2x1/4x1/4x1", "G/G/G+device+second"),
    *("pair/node/cluster+second", "G/G/G+host+second=pair"),
]
QUANTISED = {(2, 2): "zero++", (2, 2, 2): "zero-topo", (1, 4, 2): "zero-topo-8"}
"""By layout: what is not exact, of which the order alone is compared here."""
AMSP, OVER_EIGHT = ["amsp-7b", "amsp-13b"], ["zero-topo-8-exact"]
OVER_FOUR_NODES = ["amsp-30b"]
ADAPTERS = ["zero1", "zero3", "mics", "zero++-exact", "fcdp", "I/I/G+device", "paro-ing"]

PREFIX = ["zero1", "zero3", "mics", "zero++-exact", "fcdp", "paro-gng", "paro-ggg"]


@pytest.mark.parametrize(("layout", "strategies", "run"), [
    ((2, 2), TWO_LEVELS, Run()),
    ((2, 2), ADAPTERS, Run(micro_batches=(1, 4, 1), adapters=True)),
    ((2, 2), PREFIX, Run(micro_batches=(1, 2, 1), frozen=3)),
    ((2, 2, 2), THREE_LEVELS, Run()),
    ((1, 8), AMSP, Run(micro_batches=(1, 2, 1))),
    ((1, 4, 2), OVER_EIGHT, Run(micro_batches=(1, 2, 1))),
    ((4, 8), OVER_FOUR_NODES, Run(micro_batches=(1, 2))),
], ids=["two levels", "adapters", "frozen prefix", "three levels", "amsp", "second shards", "four nodes"])  # fmt: skip
@pytest.mark.slow
def test_every_strategy_trains_as_plain_fsdp2_and_sends_what_the_planner_says(
    pool: Pool, layout: tuple[int, ...], strategies: list[str], run: Run
) -> None:
    check(pool.run(layout, train_all, [REFERENCE, *strategies], run), layout, strategies)


def test_groups_of_nodes_under_one_switch_train_as_plain_fsdp2_does(pool: Pool) -> None:
    strategies = ["switch/switch/cluster", "node/switch/cluster+host", "G/G/G", "paro-ggg"]
    answers = pool.run((4, 1), train_under_switches, [REFERENCE, *strategies], Run(micro_batches=(1, 2, 1)))
    check([trained for trained, _ in answers], (4, 1), strategies)
    for rank, (_, axes) in enumerate(answers):
        switch = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert axes["switch/switch/cluster"] == [switch]
        assert axes["G/G/G"] == [[rank % 2, rank % 2 + 2], switch], (
            "what crosses switches goes first, least of all"
        )


def check(ranks: list[dict[str, Trained]], layout: tuple[int, ...], strategies: list[str]) -> None:
    nodes, per_node = layout[0], prod(layout[1:])
    for name in strategies:
        check_same_order([rank[name].launches for rank in ranks])
        for key, value in ranks[0][REFERENCE].weights.items():
            difference = (ranks[0][name].weights[key] - value).abs().max() / value.abs().max()
            assert float(difference) <= 1e-6, f"{name}: {key}"
        for rank in ranks:
            assert rank[name].losses == pytest.approx(rank[REFERENCE].losses, rel=1e-6), name
        for node in range(nodes):
            on_node = [rank[name] for rank in ranks[node * per_node : (node + 1) * per_node]]
            sent = [sum(step) for step in zip(*(rank.sent for rank in on_node), strict=True)]
            # Gradients that are added up over replicas are padded to a multiple of them: two times, three groups.
            padding = 2 * 3 * 4 * (on_node[0].replicas - 1)
            assert sent == pytest.approx(on_node[0].formula, rel=1e-12, abs=padding), name


@pytest.mark.parametrize("layout", [(2, 2), (2, 2, 2), pytest.param((1, 4, 2), marks=pytest.mark.slow)])
def test_quantized_collectives_are_launched_in_one_order(pool: Pool, layout: tuple[int, ...]) -> None:
    name = QUANTISED[layout]
    check_same_order([rank[name].launches for rank in pool.run(layout, train_all, [name], Run())])


def test_every_preset_is_among_them() -> None:
    recorded = {*TWO_LEVELS, *THREE_LEVELS, *QUANTISED.values(), *AMSP, *OVER_EIGHT, *OVER_FOUR_NODES}
    assert {*PRESETS} <= recorded


def _launches() -> list[Launch]:
    one, other = ("mesh", "0,1"), ("other", "0,1")
    return [
        (*one, "all_gather_single", 8),
        (*one, "exchange", 4),
        (*other, "exchange", 4),
        (*one, "exchange", 12),
    ]


@pytest.mark.parametrize("odd", [
    [0, 3, 2, 1],  # other order on one communicator
    [0, 2, 1, 3],  # the same order on each, another between them
    [0, 1, 2],  # one launch less
])  # fmt: skip
def test_other_orders_are_noticed(odd: list[int]) -> None:
    check_same_order([_launches(), _launches()])
    with pytest.raises(AssertionError):
        check_same_order([_launches(), [_launches()[index] for index in odd]])
    other_size = [*_launches()[:3], ("mesh", "0,1", "exchange", 16)]
    with pytest.raises(AssertionError):
        check_same_order([_launches(), other_size])
    # Threads that launch on their own communicators may interleave as they like.
    check_same_order([_launches(), [_launches()[index] for index in (0, 2, 1, 3)]], one_thread=False)
