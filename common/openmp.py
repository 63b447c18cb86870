"""Let OpenMP's threads sleep instead of spin while they wait, in this process and in those that it starts.

PyTorch, MKL and oneDNN compute with OpenMP's threads. GNU's library, which PyTorch's Linux wheels bring along, lets a
thread spin for 300,000 rounds (6 to 15 ms) whenever it waits for another one. If that one has lost its core to another
process, the core that the spinning takes is the one it waits for: two busy processes beside it made a step on two
cores several times slower. With ``PASSIVE`` a thread sleeps at once, which costs tens of microseconds per operator on a
machine with nothing else to do; so GNU's library spins for about as long first (27 ns a round, measured). Intel's and
LLVM's libraries read ``OMP_WAIT_POLICY``, too.

The libraries read this once, when they are loaded: import it before PyTorch. Variables that the user has set win.
"""

import os
from collections.abc import MutableMapping

SPIN_ROUNDS = 2000
"""Rounds that a thread spins before it sleeps: about 50 µs, the cost of being put to sleep and woken."""
WAITING_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
"""Environment variables with which users decide how threads wait."""


def let_threads_sleep(environment: MutableMapping[str, str] | None = None) -> None:
    """Set what OpenMP's libraries read when they are loaded, unless the user has decided.

    Args:
        environment: what to set it in; default: this process's, which processes that it starts inherit.
    """
    environment = os.environ if environment is None else environment
    if not any(name in environment for name in WAITING_VARIABLES):
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
        environment["GOMP_SPINCOUNT"] = str(SPIN_ROUNDS)
