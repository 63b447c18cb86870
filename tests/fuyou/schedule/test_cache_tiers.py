"""Where keys and values of generation find room, and what is said where they find none."""

from typing import Any

import pytest

from common.errors import UserError
from fuyou.layout.key_values import KeyValueCache, LayerKeyValues
from fuyou.schedule.cache_tiers import plan_with_cache

LAYERS = (LayerKeyValues((2, 8), (2, 8)),) * 3
ONE = 3 * 10 * 32 * 4
"""Bytes of one sequence of 10 tokens in fp32."""


@pytest.mark.parametrize("room", [0, 1, 2, 41, 99])
def test_what_would_fit_is_said(room: int) -> None:
    def plan(cache: KeyValueCache) -> Any:
        if cache.nbytes > room * ONE:
            raise UserError("Too little memory.")
        return cache

    advice = f"generate at most {room} at once" if room else "give more memory"
    with pytest.raises(UserError, match=rf"keeps 375 KiB .*, 3.75 KiB of each sequence, .*\({advice}, .*Too little"):
        plan_with_cache(plan, KeyValueCache(LAYERS, 4, 100, 10, 0))
