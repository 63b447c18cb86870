"""Where generation keeps keys and values: on the device as far as that costs nothing else, then in host memory."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from common.errors import UserError
from common.units import format_bytes
from fuyou.layout.key_values import KeyValueCache
from fuyou.schedule.memory_plan import MemoryPlan

_STEPS = 8
"""Numbers of blocks that are tried: multiples of an eighth of all."""


def plan_with_cache(plan: Callable[[KeyValueCache], MemoryPlan], cache: KeyValueCache) -> MemoryPlan:
    """Return the plan that keeps as many blocks' keys and values on the device as leave room for all else.

    Args:
        plan: makes a plan with keys and values on these tiers, or refuses.
        cache: sizes; how many blocks are on the device is chosen here.

    Raises:
        UserError: no plan has room for them.
    """
    plans, refused = _plans(plan, cache)
    if plans:
        return max(plans, key=_room)  # of equal ones the first, which has most on the device
    one = format_bytes(replace(cache, rows=1).nbytes)
    fits = bisect_left(range(1, cache.rows), True, key=lambda rows: not _plans(plan, replace(cache, rows=rows))[0])
    advice = f"generate at most {fits} at once" if fits else "give more memory"
    raise UserError(
        f"Generating {cache.rows} x {cache.tokens} tokens keeps {format_bytes(cache.nbytes)} of keys and values, {one} "
        f"of each sequence, on the device or in host memory, where there is no room for them ({advice}, or with "
        f"use_cache=False): {refused}"
    )


def _plans(
    plan: Callable[[KeyValueCache], MemoryPlan], cache: KeyValueCache
) -> tuple[list[MemoryPlan], UserError | None]:
    """Return the plans that there are, those with most on the device first, and why there is no other."""
    found, refused = [], None
    blocks = len(cache.layers)
    for layers in sorted({round(blocks * eighth / _STEPS) for eighth in range(_STEPS + 1)}, reverse=True):
        try:
            found.append(plan(cache.on_device(layers)))
        except UserError as error:
            refused = error
    return found, refused


def _room(plan: MemoryPlan) -> tuple[int, int]:
    """Return what keys and values on the device must not cost: prefetched blocks, and large micro-batches."""
    return plan.counts.device_blocks, plan.batch.micro_rows
