"""A profile gives the rates that the simulator counts with."""

import pytest

from tests.helpers.profiles import PROFILE


def test_rates_for_the_simulator() -> None:
    rates = PROFILE.rates()
    assert rates.flops_per_second == pytest.approx(2 * 1000 * 100 / 0.002)
    assert rates.backward_flops_per_second == pytest.approx(6 * 1000 * 100 / 0.008)
    assert PROFILE.rates(recomputed=0.5).backward_flops_per_second == pytest.approx(5 * 1000 * 100 / 0.008)
    assert (rates.upload_bytes_per_second, rates.download_bytes_per_second) == (4e9, 3e9)
    assert (rates.read_bytes_per_second, rates.write_bytes_per_second) == (2e9, 1e9)
    assert (rates.adam_parameters_per_second, rates.commit_seconds) == (2e8, 0.004)
