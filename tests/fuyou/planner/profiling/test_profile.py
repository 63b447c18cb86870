"""A profile is what JSON gives back, or not a profile."""

import json
from dataclasses import replace

import pytest

from fuyou.planner.profiling import Profile
from tests.helpers.profiles import PROFILE


def test_through_json_and_back() -> None:
    assert Profile.from_dict(json.loads(json.dumps(PROFILE.to_dict()))) == PROFILE


def test_rates_for_the_simulator() -> None:
    rates = PROFILE.rates()
    assert rates.flops_per_second == pytest.approx(2 * 1000 * 100 / 0.002)
    assert rates.backward_flops_per_second == pytest.approx(6 * 1000 * 100 / 0.008)
    assert PROFILE.rates(recomputed=0.5).backward_flops_per_second == pytest.approx(5 * 1000 * 100 / 0.008)
    assert (rates.upload_bytes_per_second, rates.download_bytes_per_second) == (4e9, 3e9)
    assert (rates.read_bytes_per_second, rates.write_bytes_per_second) == (2e9, 1e9)
    assert (rates.adam_parameters_per_second, rates.commit_seconds) == (2e8, 0.004)


@pytest.mark.parametrize(
    "spoil",
    [
        {"tokens": "many"}, {"read_bytes_per_second": float("nan")}, {"commit_seconds": -1.0}, {"tokens": 0},
        {"adam_parameters_per_second": 0.0}, {"adam_parameters_per_second": None}, {"surprise": 1},
    ],
)  # fmt: skip
def test_not_a_profile(spoil: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not a profile"):
        Profile.from_dict({**PROFILE.to_dict(), **spoil})
    with pytest.raises(ValueError, match="not a profile"):
        Profile.from_dict({name: value for name, value in PROFILE.to_dict().items() if name != "tokens"})
    assert replace(PROFILE) == PROFILE
