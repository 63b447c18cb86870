"""The pool misses as rarely as any policy can, and says exactly who has to leave and who is still busy."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import FinetuneError
from fuyou.schedule.buffer_pool import NEVER, Pool, SortedPool
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
        later = (index for index in range(self.position + 1, len(self.sequence)) if self.sequence[index] == key)
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


@pytest.mark.parametrize("count", range(1, 9))
def test_training_order_misses_what_it_must(count: int) -> None:
    """Forward and backward over eight blocks, again and again: there and back, what is near the turn stays."""
    layers = [str(layer) for layer in range(8)]
    walk = Walk((layers + layers[::-1]) * 3, count).run()
    # Per pass of eight, all but what is kept from the turn are missed.
    assert walk.misses == 8 + 5 * (8 - count)


def test_among_buffers_that_nothing_needs_the_one_idle_longest_is_taken() -> None:
    pool = Pool("test", 3, lambda key: NEVER)
    for index, key in enumerate("abc"):
        taken, leaving = pool.take(key)
        assert (taken, leaving) == (index, None)
        pool.fill(taken, key, task())
    pool.use(0, task())
    assert pool.take("d") == (1, None)
    pool.fill(1, "d", task())
    assert pool.take("e") == (2, None)


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


def test_who_must_be_finished_before_a_buffer_is_overwritten() -> None:
    pool = Pool("test", 1, lambda key: NEVER)
    assert pool.slots[0].busy() == []
    ready, first, second = task(), task(), task()
    index, _ = pool.take("a")
    pool.fill(index, "a", ready)
    pool.use(index, first)
    pool.use(index, second)
    assert pool.slots[index].busy() == [first, second, ready]
    pool.drop("a")
    assert pool.find("a") is None
    index, leaving = pool.take("b")
    assert leaving is None and pool.slots[index].busy() == [first, second, ready]
    pool.fill(index, "b", again := task())
    assert pool.slots[index].busy() == [again]


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


def test_dropping_a_missing_thing_is_nothing() -> None:
    pool = Pool("test", 1, lambda key: NEVER)
    pool.drop("a")
    index, _ = pool.take("b")
    pool.fill(index, "b", task())
    pool.drop("a")
    assert pool.find("b") == index


def test_what_came_last_stays_if_another_can_leave() -> None:
    uses = {"a": 1.0, "b": 2.0, "c": 3.0}
    for spared, left in ((0, "b"), (1, "a")):
        pool = Pool("test", 2, lambda key: uses[str(key)], spared)
        for key in "ab":
            pool.fill(pool.take(key)[0], key, task())
        assert pool.take("c", ["c"])[1] == left
    only = Pool("test", 1, lambda key: uses[str(key)], spared=1)
    only.fill(only.take("a")[0], "a", task())
    assert only.take("b")[1] == "a"


class Uses:
    """Objects with the uses that are left of them, and a pool that holds some."""

    def __init__(self, kind: type[Pool], left: list[list[int]], count: int):
        self.left = [sorted(uses, reverse=True) for uses in left]
        self.pool = kind("test", count, lambda key: self.left[key][-1] if self.left[key] else NEVER, spared=1)

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
            if isinstance(pool, SortedPool):
                pool.update_next_use(key)
        return index, left


@settings(max_examples=150)
@given(
    st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=6, max_size=6),
    st.lists(st.tuples(st.sampled_from(["use", "use", "touch", "drop"]), st.integers(0, 5), st.integers(0, 5))),
    st.integers(2, 5),
)
def test_the_sorted_pool_gives_up_what_the_plain_one_does(
    left: list[list[int]], actions: list[tuple[str, int, int]], count: int
) -> None:
    plain, fast = Uses(Pool, left, count), Uses(SortedPool, left, count)
    for action in actions * 3:  # long enough for its heap to be made again
        assert fast.act(*action) == plain.act(*action)
