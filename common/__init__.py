"""The ground floor: memory tiers, storage, hardware, models, data, checkpoints, reports.

Nothing in here knows about training. ``fuyou`` and ``fcdp`` stand on it.
"""

from common.openmp import let_threads_sleep

#: Lets ``fuyou`` and ``fcdp`` tell this package from another one that is also called ``common``.
PROJECT = "fuyou"

# Here, since every process of ours (command, ranks, optimizer process) imports this package before PyTorch.
let_threads_sleep()
