import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from common.store.posix import Transfer


def test_the_future_waits_for_pieces_that_outlive_a_failure():
    release, failed = threading.Event(), threading.Event()
    still_running = []

    def slow():
        still_running.append(True)
        failed.wait(5)
        release.wait(5)
        still_running.pop()

    def failing():
        failed.set()
        raise OSError("first")

    with ThreadPoolExecutor(2) as pool:
        transfer = Transfer(2)
        transfer.submit(pool, slow)
        transfer.submit(pool, failing)
        assert failed.wait(5)
        assert not transfer.future.done()
        assert not transfer.future.cancel()
        release.set()
        with pytest.raises(OSError, match="first"):
            transfer.future.result(5)
        assert not still_running


def test_pieces_after_a_failure_are_skipped():
    ran = []

    def failing():
        raise OSError("first")

    with ThreadPoolExecutor(1) as pool:
        transfer = Transfer(3)
        transfer.submit(pool, failing)
        for _ in range(2):
            transfer.submit(pool, ran.append, 1)
        with pytest.raises(OSError, match="first"):
            transfer.future.result(5)
    assert ran == []


def test_an_executor_that_was_shut_down_fails_the_future_and_nothing_else():
    pool = ThreadPoolExecutor(1)
    transfer = Transfer(2)
    transfer.submit(pool, lambda: None)
    pool.shutdown()
    transfer.submit(pool, lambda: None)
    with pytest.raises(RuntimeError, match="shutdown"):
        transfer.future.result(5)


@pytest.mark.parametrize("fails", [False, True])
def test_buffers_live_until_the_future_is_done_and_no_longer(fails):
    go = threading.Event()
    seen = []

    def work(view):
        go.wait(5)
        seen.append(int(view[0]))
        if fails:
            raise OSError("late")

    with ThreadPoolExecutor(1) as pool:
        buffer = np.full(3, 7, np.uint8)
        alive = weakref.ref(buffer)
        transfer = Transfer(1)
        transfer.submit(pool, work, buffer)
        del buffer
        gc.collect()
        assert alive() is not None
        released = []
        transfer.future.add_done_callback(lambda future: released.append(alive() is None))
        go.set()
        assert (transfer.future.exception(5) is not None) == fails
    assert seen == [7]
    assert released == [True]
