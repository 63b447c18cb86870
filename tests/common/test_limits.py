"""Time and memory of work are limited in the main thread, and no longer than it takes."""

import contextlib
import itertools
import resource
import signal
import threading

import pytest

from common.limits import LimitExceeded, limited


def test_a_loop_is_interrupted() -> None:
    with pytest.raises(LimitExceeded, match=r"takes longer than 0\.05 s"), limited(0.05, None):
        any(False for _ in itertools.count())


def test_one_long_operation_is_interrupted() -> None:
    with pytest.raises(LimitExceeded), limited(0.05, None):
        _ = 7 ** (7**10)


def test_code_that_tries_again_after_exceptions_is_interrupted() -> None:
    def try_again() -> None:
        while True:
            with contextlib.suppress(Exception):
                raise ValueError

    with pytest.raises(LimitExceeded), limited(0.05, None):
        try_again()


def test_memory_is_refused_before_it_is_there() -> None:
    with pytest.raises(LimitExceeded, match="takes more than 64 MiB of memory"), limited(None, 64 << 20):
        _ = "a" * (1 << 40)


def test_limits_end_with_the_work() -> None:
    before = signal.getsignal(signal.SIGALRM), resource.getrlimit(resource.RLIMIT_AS)
    with limited(10, 1 << 30):
        assert resource.getrlimit(resource.RLIMIT_AS) != before[1]
    assert (signal.getsignal(signal.SIGALRM), resource.getrlimit(resource.RLIMIT_AS)) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_other_threads_have_no_limits() -> None:
    sizes: list[int] = []

    def work() -> None:
        with limited(1e-3, 1 << 20):
            sizes.append(len("a" * (16 << 20)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert sizes == [16 << 20]
