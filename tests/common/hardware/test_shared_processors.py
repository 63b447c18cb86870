"""Threads spin while nobody else needs the processors, and sleep early while somebody does."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from common.openmp import PROCESSORS, SCHEDULER_TIMES, WAITING_VARIABLES

import pytest

from common.hardware import shared_processors
from common.hardware.shared_processors import is_shared

needs_gnu = pytest.mark.skipif(
    sys.platform != "linux" or PROCESSORS < 2 or not SCHEDULER_TIMES.exists(), reason="nothing spins here, or unseen"
)

WAITING = """
import common.hardware.shared_processors as ours
import time, torch
torch.set_num_threads(2)
x = torch.ones(512, 320)

def spun():
    '''Processor seconds of 40 operators with 5 ms between them.'''
    before = time.process_time()
    for _ in range(40):
        x.exp()
        time.sleep(0.005)
    return time.process_time() - before

x.exp()
libraries = ours._gnu_libraries()
if not libraries:
    raise SystemExit(77)
alone = spun()
team = ours.IdleTeam(libraries)
beside = spun()
team.end()
print(alone, beside, spun())
"""

NO_MORE = """
import threading
import common.hardware.shared_processors as ours
import torch
torch.ones(512, 320).exp()
start = threading.Thread.start
threads = []
def start_one(thread):
    if threads:
        raise RuntimeError("can't start new thread")
    threads.append(thread)
    start(thread)
threading.Thread.start = start_one
print(ours._idle_team(ours._gnu_libraries()), "going on")
"""

WATCHED = """
import os, threading, time
import common.hardware.shared_processors as ours
import torch
ours.PERIOD_SECONDS = 0.05
if not ours._gnu_libraries():
    raise SystemExit(77)
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
for _ in range(2):
    if os.fork() == 0:
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            pass
        os._exit(0)
seen = set()
true = ours.is_shared
ours.is_shared = lambda *seconds: seen.add(true(*seconds)) or true(*seconds)
ours.watch_processors()
ours.watch_processors()
until = time.monotonic() + 1.5
while time.monotonic() < until:
    pass
names = [thread.name for thread in threading.enumerate()]
print(True in seen, names.count("processors"), names.count("idle OpenMP team"))
"""


def run(code: str) -> list[str]:
    """Run it in a process in which we decide how threads wait; return the words that it prints."""
    clean = {name: value for name, value in os.environ.items() if name not in (*WAITING_VARIABLES, "OMP_NUM_THREADS")}
    done = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, timeout=120)
    if done.returncode == 77:
        pytest.skip("PyTorch came with another OpenMP library than GNU's")
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@needs_gnu
def test_an_idle_team_lets_the_others_sleep_and_its_end_lets_them_spin() -> None:
    alone, beside, again = map(float, run(WAITING))
    assert beside < 0.5 * alone
    assert beside < 0.5 * again


@needs_gnu
def test_a_system_that_allows_no_more_threads_does_not_end_the_process() -> None:
    assert run(NO_MORE) == ["None", "going", "on"]


@needs_gnu
def test_busy_processes_on_the_same_processor_are_noticed() -> None:
    assert run(WATCHED) == ["True", "1", "1"]


@pytest.mark.parametrize(
    ("ran", "waited", "shared"),
    [(0.4, 0.06, False), (0.36, 0.2, True), (0.17, 0.19, True), (0.01, 0.03, None), (0.0, 0.0, None)],
)
def test_waiting_counts_as_a_part_of_what_a_thread_wanted(ran: float, waited: float, shared: bool | None) -> None:
    assert is_shared(ran, waited) is shared


class Teams:
    """Stands in for :class:`IdleTeam`: how many there are, and were."""

    def __init__(self) -> None:
        self.open = self.made = 0

    def __call__(self, _: list[object]) -> "Teams":
        self.open += 1
        self.made += 1
        return self

    def end(self) -> None:
        self.open -= 1


def test_threads_spin_again_some_time_after_processors_were_last_shared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    teams, times = Teams(), tmp_path / "schedstat"
    nanoseconds = [0, 0]

    def want(ran: float, waited: float) -> None:
        nanoseconds[0] += int(ran * 1e9)
        nanoseconds[1] += int(waited * 1e9)
        times.with_suffix(".new").write_text(f"{nanoseconds[0]} {nanoseconds[1]} 1\n")
        times.with_suffix(".new").rename(times)

    def eventually(count: int) -> float:
        began = time.monotonic()
        while teams.open != count:
            assert time.monotonic() < began + 30
            time.sleep(0.001)
        return time.monotonic()

    monkeypatch.setattr(shared_processors, "IdleTeam", teams)
    monkeypatch.setattr(shared_processors, "PERIOD_SECONDS", 0.05)
    monkeypatch.setattr(shared_processors, "CALM_SECONDS", 0.5)
    want(0, 0)
    watching = threading.Thread(target=shared_processors._watch, args=(times, []))
    watching.start()
    eventually(1)  # nobody knows yet
    time.sleep(0.2)
    assert teams.open == 1
    want(1, 0)
    eventually(0)
    want(1, 1)
    shared = eventually(1)
    while teams.open:
        want(1, 0.1)
        time.sleep(0.02)
    assert time.monotonic() - shared > 0.4
    want(1, 1)
    eventually(1)
    times.unlink()  # the thread has ended
    watching.join(30)
    assert (watching.is_alive(), teams.open, teams.made) == (False, 0, 3)
