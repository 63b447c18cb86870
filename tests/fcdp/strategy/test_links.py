"""Levels inside a node, from which GPUs NVLink connects."""

import pytest

from fcdp.strategy.topology import group_size


@pytest.mark.parametrize(("peers", "size"), [
    ([{1}, {0}, {3}, {2}], 2),
    ([{1, 2, 3}, {0, 2, 3}, {0, 1, 3}, {0, 1, 2}, {5, 6, 7}, {4, 6, 7}, {4, 5, 7}, {4, 5, 6}], 4),
    ([{1, 2, 3}, {0, 2, 3}, {0, 1, 3}, {0, 1, 2}], 1),  # all with all: the node is the level
    ([set(), set(), set()], 1),
    ([{2}, {3}, {0}, {1}], 1),  # pairs, but ranks that follow each other are in different ones
    ([{1}, {0}, set(), set()], 1),
    ([{1}, {0, 2}, {1, 3}, {2}], 1),  # a chain
    ([{1}, {0}, {3}, {2}, set()], 1),
    ([], 1),
])  # fmt: skip
def test_groups_are_equal_complete_and_of_consecutive_gpus(peers: list[set[int]], size: int) -> None:
    assert group_size(peers) == size
