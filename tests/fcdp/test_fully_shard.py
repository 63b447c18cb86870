"""``fully_shard`` with FSDP2's signature, and ``install``, next to FSDP2's own on 2 nodes of 2 ranks: bit for bit.

FSDP2 gets a reduction that adds in our order (``tests/helpers/fcdp/twin.py``), where more than two ranks reduce.
"""

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import fcdp
from common.errors import UserError
from tests.helpers.fcdp import module_cases as cases
from tests.helpers.fcdp.cases import Case, make_model
from tests.helpers.fcdp.pool import Pool

FOUR = (2, 2)


@functools.cache
def _plain(pool: Pool, steps: int) -> list[Any]:
    return pool.run(FOUR, cases.on_nodes_of_two, cases.train, Case(steps=steps), False)


def _same(pool: Pool, call: Any, *args: Any) -> list[Any]:
    """Run with FSDP2 and with ours; assert the same losses and weights; return what ranks of ours said."""
    plain, ours = (
        pool.run(FOUR, cases.on_nodes_of_two, call, *args, False),
        pool.run(FOUR, cases.on_nodes_of_two, call, *args, True),
    )
    assert [one[:2] for one in ours] == [one[:2] for one in plain]
    assert len({loss for one in ours for loss in one[0]}) > 5
    return ours


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        pytest.param(Case(lora=True), marks=pytest.mark.slow),
        Case(lora=True, bf16=True, checkpointing=True),
    ],
    ids=["full", "lora", "bf16"],
)
def test_module_by_module_equals_fsdp2_and_sends_what_the_formula_says(pool: Pool, case: Case) -> None:
    ours = _same(pool, cases.train, case)
    for node in range(2):
        counted = sum(ours[2 * node + place][2][0] for place in range(2))
        assert counted == ours[0][2][1]


@pytest.mark.parametrize("strategy", ["fcdp", "zero3", "zero++-exact", "paro-igg", "paro-ngg"])
def test_a_model_that_fsdp2_has_sharded(pool: Pool, strategy: str) -> None:
    plain = _plain(pool, 4)
    ours = pool.run(FOUR, cases.on_nodes_of_two, cases.train_sharded, strategy)
    if strategy in ("zero3",):  # a flat ring adds in another order
        assert [one[0] for one in ours] == [pytest.approx(one[0], rel=1e-5) for one in plain]
    else:
        assert ours == [one[:2] for one in plain]


@pytest.mark.parametrize("strategy", ["zero3", "paro-ggg"])
def test_what_is_frozen_before_all_that_is_trained_is_not_gathered_again(pool: Pool, strategy: str) -> None:
    counts, formulas = zip(
        *pool.run(FOUR, cases.on_nodes_of_two, cases.sent_after_a_frozen_prefix, strategy), strict=True
    )
    assert (counts[0] + counts[1], counts[2] + counts[3]) == formulas[:2]


@pytest.mark.parametrize(
    ("kind", "nodes"),
    [("tp", (2, 1)), pytest.param("tp-outside", (1, 2), marks=pytest.mark.slow), ("hsdp", (1, 2))],
)
def test_meshes_of_two_dimensions(pool: Pool, kind: str, nodes: tuple[int, int]) -> None:
    assert {one[2] for one in _same(pool, cases.train_two_dimensions, kind)} == {nodes}


def test_a_world_of_which_some_ranks_train(pool: Pool) -> None:
    # A layout that no other test here has: where some ranks have made groups, PyTorch's counts of them differ.
    plain, ours = (
        pool.run((4, 1), cases.on_nodes_of_two, cases.train_on_some, which) for which in (False, True)
    )
    assert ours == plain
    assert [len(losses) for losses in ours] == [0, 3, 3, 0]


@pytest.mark.parametrize(
    "what",
    ["unshard", "accumulate", "factor 8.0", "ema", "local", "state",
     *(pytest.param(name, marks=pytest.mark.slow) for name in ("keep", "factor 1.0", "data", "invalidate"))],
)  # fmt: skip
def test_methods_of_fsdp2_and_changes_in_place(pool: Pool, what: str) -> None:
    _same(pool, cases.like_fsdp2, what)


@pytest.mark.parametrize("first_ours", [True, False])
def test_checkpoints_of_one_are_loaded_by_the_other(pool: Pool, first_ours: bool, tmp_path: Path) -> None:
    plain = _plain(pool, 6)
    mixed = pool.run(FOUR, cases.on_nodes_of_two, cases.checkpoint, str(tmp_path / "saved"), first_ours)
    assert mixed == [one[:2] for one in plain]


def _mistakes(topology: fcdp.Topology) -> list[str]:
    mesh = dist.device_mesh.init_device_mesh("cpu", (4,))
    model = cases.shard(make_model(Case()), fcdp.fully_shard, mesh, cases.MixedPrecisionPolicy())
    said = []
    for call in (
        lambda: fcdp.install(make_model(Case())),
        lambda: fcdp.install(model, strategy="mics"),
        lambda: (fcdp.install(model), fcdp.install(model)),
        lambda: (os.environ.update(LOCAL_WORLD_SIZE="3"), fcdp.Topology.from_mesh(mesh)),
        lambda: fcdp.Topology.from_mesh(dist.device_mesh.DeviceMesh("cpu", [[[0, 1], [2, 3]]])),
        lambda: fcdp.fully_shard([model.lm_head], topology),
        lambda: fcdp.Topology.from_mesh(dist.device_mesh.DeviceMesh("cpu", [0, 2, 1, 3])),
        lambda: fcdp.replace_fsdp2("fcpd"),
    ):
        try:
            call()
            said.append("nothing")
        except UserError as error:
            said.append(str(error))
    return said


def test_what_cannot_be_is_rejected(pool: Pool) -> None:
    words = [
        "is not sharded",
        "over 2 of the 4",
        "called once",
        "node by node",
        "one dimension, or two",
        "one whole",
    ]
    words += ["[0, 2, 1, 3]", "fcpd"]
    for said in pool.run(FOUR, cases.on_nodes_of_two, _mistakes):
        for message, part in zip(said, words, strict=True):
            assert part in message
