"""The ground floor: memory tiers, storage, hardware, models, data, checkpoints, reports.

Nothing in here knows about training. ``fuyou`` and ``fcdp`` stand on it.
"""

#: Lets ``fuyou`` and ``fcdp`` tell this package from another one that is also called ``common``.
PROJECT = "fuyou"
