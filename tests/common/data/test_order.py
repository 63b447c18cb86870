"""The shuffle is a permutation, can be requested in parts, and looks random."""

from collections import Counter

import numpy as np
import pytest

from common.data.pack import shuffled


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 64, 65, 1000, 4097])
def test_permutation(count: int) -> None:
    order = shuffled(np.arange(count), count, (3, 4))
    assert sorted(order.tolist()) == list(range(count))


def test_parts_equal_the_whole() -> None:
    whole = shuffled(np.arange(257), 257, (0, 9))
    assert [int(shuffled(np.array([i]), 257, (0, 9))[0]) for i in range(257)] == whole.tolist()


def test_huge_counts_need_no_memory() -> None:
    count = 3 * 10**12
    order = shuffled(np.arange(1000), count, (1, 1))
    assert len(set(order.tolist())) == 1000
    assert order.min() >= 0
    assert order.max() < count
    assert order.max() > count // 2


def test_every_order_is_as_likely() -> None:
    orders = Counter(tuple(shuffled(np.arange(4), 4, (0, epoch)).tolist()) for epoch in range(2400))
    assert len(orders) == 24
    assert all(50 < seen < 150 for seen in orders.values())  # 100 each, give or take 5 standard deviations


def test_key_decides() -> None:
    keys = [(0, 0), (0, 1), (1, 0), (1, 1), (2**63, 0), (7, 10**12)]
    assert len({tuple(shuffled(np.arange(100), 100, key).tolist()) for key in keys}) == len(keys)
    again = shuffled(np.arange(100), 100, (1, 0))
    assert again.tolist() == shuffled(np.arange(100), 100, (1, 0)).tolist()
    # Neighbours do not stay neighbours.
    assert np.mean(np.abs(np.diff(again)) == 1) < 0.1
