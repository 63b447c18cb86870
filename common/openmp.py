"""Decide how OpenMP's threads wait, in this process and in those that it starts.

PyTorch, MKL and oneDNN compute with OpenMP's threads, which wait for each other after every operator. GNU's library,
which PyTorch's Linux wheels bring along, lets them spin before they sleep, for 300,000 rounds (6 to 15 ms). That is the
fastest on processors that nobody else needs. Where others do, a thread that spins has the processor that the one it
waits for should have: two busy processes beside it made a step on two processors several times slower.

So threads spin long as long as :mod:`common.hardware.shared_processors` finds that nobody else needs the processors.
Otherwise GNU's library spins for 1,000 rounds, as it does by itself where it has more threads than processors and
``OMP_WAIT_POLICY`` is ``ACTIVE``. Intel's and LLVM's libraries obey ``KMP_BLOCKTIME``: their threads sleep at once.

The libraries read this once, when they are loaded: import it before PyTorch. Variables that the user has set win.
"""

import os
from collections.abc import MutableMapping
from pathlib import Path

LONG_SPIN = 300_000
"""Rounds that a thread spins before it sleeps, 27 ns each (measured): GNU's own default."""
SHORT_SPIN = 2000
"""The same for about 50 µs, the cost of being put to sleep and woken."""
WAITING_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
"""Environment variables with which users decide how threads wait."""
SCHEDULER_TIMES = Path("/proc/thread-self/schedstat")
"""Nanoseconds that a thread ran, and that it waited for a processor; not there if the kernel does not count them."""
PROCESSORS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
"""That this process may use now, and that GNU's library therefore finds when it is loaded."""
_OURS = {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": str(LONG_SPIN), "KMP_BLOCKTIME": "0"}


def decide_waiting(environment: MutableMapping[str, str] | None = None) -> None:
    """Set what OpenMP's libraries read when they are loaded, unless the user has decided.

    Args:
        environment: what to set it in; default: this process's, which processes that it starts inherit.
    """
    environment = os.environ if environment is None else environment
    if not any(name in environment for name in WAITING_VARIABLES):
        environment.update(_OURS)
        if not SCHEDULER_TIMES.exists():  # nobody would notice that processors are shared
            spin_briefly(environment)


def spins_long(environment: MutableMapping[str, str] | None = None) -> bool:
    """Return whether threads spin long because :func:`decide_waiting` said so, here or in the process before us."""
    environment = os.environ if environment is None else environment
    return all(environment.get(name) == _OURS.get(name) for name in WAITING_VARIABLES)


def spin_briefly(environment: MutableMapping[str, str]) -> None:
    """Let the threads of a process that is to be started spin briefly, unless the user has decided.

    For processes that share processors with another one of ours, all the time.
    """
    if spins_long(environment):
        environment["GOMP_SPINCOUNT"] = str(SHORT_SPIN)
