"""Which of the stores on the drives of all ranks count, and the errors where they do not make up a run."""

from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest

from common.errors import UserError
from fuyou.checkpoint.shards import (
    IN_FOLDERS,
    IN_PLACE,
    OF_RUN,
    SIBLING,
    DriveScan,
    LocalShard,
    ShardSet,
    choose_shard_set,
    describe_conflict,
    find_shard_sets,
)
from fuyou.layout.share import Share

ALONE, NODES = Share(), Share(2, 1)


def shard(
    rank: int,
    *steps: int,
    run: str = "abc",
    nodes: int = 2,
    replaces: Sequence[str] = (),
    location: int = IN_PLACE,
) -> LocalShard:
    return LocalShard(f"{run}{rank}", [f"/{run}"], run, nodes, 1, rank, steps, replaces, location)


def scans(*shards: LocalShard | None) -> list[DriveScan]:
    """One rank has found each."""
    return [DriveScan(f"host{rank}", [each] if each else []) for rank, each in enumerate(shards)]


def chosen(share: Share, *found: DriveScan) -> ShardSet | None:
    told = [DriveScan.from_dict(asdict(scan)) for scan in found]
    return choose_shard_set(find_shard_sets(told), share, told)


@pytest.mark.parametrize(
    ("first", "second", "step"),
    [((7, 6), (7, 6), 7), ((7, 6), (8, 7), 7), ((1, 0), (0,), 0), ((6, 5), (7, 6), 6)],
)
def test_ranks_continue_from_the_newest_step_that_all_have(
    first: tuple[int, ...], second: tuple[int, ...], step: int
) -> None:
    counting = chosen(NODES, *scans(shard(0, *first), shard(1, *second)))
    assert counting is not None and counting.fits(NODES) and counting.common_step(["host0", "host1"]) == step


@pytest.mark.parametrize(
    ("found", "problems", "said"),
    [
        (
            (shard(0, 7, 6), None),
            ("", "/ssd holds no run."),
            r"Not all nodes .* node 1 \(host1\): /ssd holds no run",
        ),
        ((None, None), ("/ssd holds no run.", "no."), "nothing to continue. node 0"),
        (
            (shard(0, 7), shard(1, 7, run="xyz")),
            ("", ""),
            "one run. node 0 .* of run abc. node 1 .* of run xyz",
        ),
        ((shard(1, 7), shard(0, 7)), ("", ""), r"node 0 \(host0\): holds the part of rank 1"),
        ((shard(0, 7), shard(0, 7)), ("", ""), r"node 1 \(host1\): holds the part of rank 0"),
    ],
)
def test_stores_that_do_not_make_up_a_run(
    found: tuple[LocalShard | None, ...], problems: tuple[str, ...], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        raise UserError(describe_conflict(NODES, scans(*found), problems))


def test_a_set_counts_when_it_is_complete() -> None:
    """The successor of a run of two nodes on one of them, before and after it is committed."""
    old = shard(0, 7, 6), shard(1, 6, 5, location=IN_FOLDERS)
    new = shard(0, 6, run="new", nodes=1, replaces=["abc0", "abc1"])
    before, after = DriveScan("host0", old), DriveScan("host0", [*old, new])
    for scan, nodes in ((before, 2), (after, 1)):
        counting = chosen(ALONE, scan)
        assert counting is not None and counting.share.nodes == nodes and counting.newest == 6
    later = DriveScan("host0", [*(shard(rank, 9, 8) for rank in (0, 1)), new])
    counting = chosen(ALONE, later)
    assert counting is not None and counting.share.nodes == 2, "it was continued as it was"


def test_where_something_is_missing() -> None:
    with pytest.raises(
        UserError, match=r"made by 2 nodes with 1 rank each .* what node 1 had .* is not here"
    ):
        chosen(ALONE, *scans(shard(0, 7, 6)))
    assert chosen(NODES, *scans(shard(0, 7, 6), None)) is None, "opening it says what"
    assert chosen(NODES, *scans(None, None)) is None


def test_another_run() -> None:
    other = shard(0, 9, run="other", nodes=1, location=OF_RUN)
    counting = chosen(ALONE, DriveScan("host0", [shard(0, 7, nodes=1), other]))
    assert counting is not None and counting.newest == 7, "it lies inside, left by ranks"
    with pytest.raises(UserError, match="/other holds another run than the one that continues here in /abc"):
        chosen(ALONE, DriveScan("host0", [shard(0, 7, nodes=1), replace(other, location=IN_FOLDERS)]))
    assert chosen(ALONE, DriveScan("host0", [replace(other, location=SIBLING)])) is None
