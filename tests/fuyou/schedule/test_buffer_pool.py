"""The pool misses as rarely as any policy can, and says exactly who has to leave and who is still busy."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import FinetuneError
from fuyou.schedule.buffer_pool import NEVER, Pool
from fuyou.schedule.tasks import Op, Task


def task() -> Task:
    return Task(Op.COMPUTE, [])


class Walk:
    """Runs a sequence of uses through a pool, as the scheduler does."""

    def __init__(self, sequence: list[str], count: int):
        self.sequence, self.position = sequence, 0
        self.pool = Pool("test", count, self.next_use)
        self.misses = 0
        self.written_back: list[str] = []

    def next_use(self, key: object) -> float:
        later = (
            index for index in range(self.position + 1, len(self.sequence)) if self.sequence[index] == key
        )
        return next(later, NEVER)

    def run(self) -> "Walk":
        for position, key in enumerate(self.sequence):
            self.position = position
            index = self.pool.find(key)
            if index is None:
                self.misses += 1
                index, leaving = self.pool.take(key)
                if leaving is not None:
                    assert self.next_use(leaving) != NEVER
                    assert self.pool.find(leaving) is None
                self.pool.fill(index, key, task())
            self.pool.use(index, task())
            assert self.pool.find(key) == index and self.pool.slots[index].key == key
            held = [slot.key for slot in self.pool.slots if slot.key is not None]
            assert len(held) == len(set(held)) and set(held) <= set(self.sequence[: self.position + 1])
        return self


def fewest_misses(sequence: list[str], count: int) -> int:
    """By trying every choice of what to give up."""

    @cache
    def best(position: int, held: frozenset[str]) -> int:
        if position == len(sequence):
            return 0
        key = sequence[position]
        if key in held:
            return best(position + 1, held)
        if len(held) < count:
            return 1 + best(position + 1, held | {key})
        return 1 + min(best(position + 1, held - {victim} | {key}) for victim in held)

    return best(0, frozenset())


@settings(max_examples=150)
@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=14), st.integers(1, 4))
def test_no_policy_misses_less(sequence: list[str], count: int) -> None:
    assert Walk(sequence, count).run().misses == fewest_misses(sequence, count)


def test_what_is_pinned_stays_and_a_full_pool_is_reported() -> None:
    uses = {"a": 5.0, "b": 3.0, "c": 1.0}
    pool = Pool("activation", 2, lambda key: uses.get(str(key), NEVER))
    for key in "ab":
        index, _ = pool.take(key)
        pool.fill(index, key, task())
    with pytest.raises(FinetuneError, match=r"All 2 buffers of the activation pool are in use; c finds none"):
        pool.take("c", pinned=["a", "b"])
    assert pool.find("a") == 0 and pool.find("b") == 1
    assert pool.take("c", pinned=["a", None]) == (1, "b")
    assert pool.find("b") is None and pool.find("a") == 0


@pytest.mark.parametrize(("spared", "least", "fetches"), [(0, 1, 36), (2, 3, 48)])
def test_what_comes_round_after_round_waits_for_the_last_computation_if_none_is_spared(
    spared: int, least: int, fetches: int
) -> None:
    objects, turn = 8, [0]
    pool = Pool("test", 4, lambda key: turn[0] + (int(str(key)) - turn[0]) % objects, spared)
    ages, last = [], {}  # how many computations ago a buffer was used that is given away
    for turn[0] in range(8 * objects):
        key = turn[0] % objects
        index = pool.find(key)
        if index is None:
            index, _ = pool.take(key)
            ages += [turn[0] - last[index]] if index in last else []
            pool.fill(index, key, task())
        pool.use(index, task())
        pool.end_computation()
        last[index] = turn[0]
    assert (min(ages), len(ages)) == (least, fetches)


class Uses:
    """Objects with the uses that are left of them, and a pool that holds some."""

    def __init__(self, announced: bool, left: list[list[int]], count: int):
        self.left = [sorted(uses, reverse=True) for uses in left]
        self.pool = Pool(
            "test",
            count,
            lambda key: self.left[key][-1] if self.left[key] else NEVER,
            spared=1,
            announced=announced,
        )

    def act(self, action: str, key: int, pinned: int) -> object:
        """What the schedule does with an object; returns whom it drove out."""
        pool, index, left = self.pool, self.pool.find(key), None
        if index is None:
            index, left = pool.take(key, [pinned], spare_empty=action == "use")
            pool.fill(index, key, task())
        if action == "drop":
            pool.drop(key)
        pool.use(index, task())
        if action == "touch":
            pool.end_computation()
        if action == "use" and self.left[key]:
            self.left[key].pop()
            pool.update_next_use(key)
        return index, left


@settings(max_examples=150)
@given(
    st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=6, max_size=6),
    st.lists(
        st.tuples(st.sampled_from(["use", "use", "touch", "drop"]), st.integers(0, 5), st.integers(0, 5))
    ),
    st.integers(2, 5),
)
def test_a_pool_that_is_told_of_changes_gives_up_what_one_that_sorts_does(
    left: list[list[int]], actions: list[tuple[str, int, int]], count: int
) -> None:
    plain, fast = Uses(False, left, count), Uses(True, left, count)
    for action in actions * 3:  # long enough for its heap to be made again
        assert fast.act(*action) == plain.act(*action)
