"""The step that the planner predicts from what ``limits`` has measured, to be compared with the step that was taken."""

from typing import Any

import fuyou
from fuyou.planner.rates import TaskRates
from fuyou.planner.simulator import simulate

BLOCK_FRACTION = 0.8
"""Fraction of the best matrix product's rate that blocks are taken to reach: between 0.64 (an A100) and 0.99 (an RTX
4090) of the data sheet's, configs/gpus. The step's own figure is ``of matmul`` in the report."""


def predicted_seconds(engine: fuyou.Engine, limits: dict[str, Any]) -> float | None:
    """Return the simulated seconds of a step with the engine's buffers; None where a limit was not measured.

    Args:
        engine: open, with the memory plan of the batch.
        limits: figures of the section ``limits``.
    """
    matmul, store, adam, copies = (limits.get(name) for name in ("matmul", "store", "adam", "copies"))
    if not (isinstance(matmul, dict) and isinstance(store, dict) and isinstance(adam, dict)):
        return None
    links = copies if isinstance(copies, dict) else {}  # a CPU copies to itself, as fast as its memory
    rates = TaskRates(
        BLOCK_FRACTION * matmul["best_flops_per_second"],
        links.get("to_device_beside", 1e10),
        links.get("to_host_beside", 1e10),
        store["read"],
        store["write"],
        adam["bf16"],
    )
    run = engine._run
    deferred = run.config.update_policy.deferred(run.shape)
    simulation, _ = simulate(run.shape, engine.memory_plan, rates, deferred)
    return simulation.step_seconds()
