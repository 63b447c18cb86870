"""Which steps mark which groups, while parameters come and go."""

import pytest
import torch
from torch import nn

import fcdp
from fcdp.cache.staleness import StaleCacheError, StalenessCheck
from fcdp.grouping import ParameterGroup
from tests.helpers.fcdp.pool import Pool


def _check_as_on_cuda(topology: fcdp.Topology, stale_rank: int) -> list[bool]:
    """Whether this rank is stopped before each of two steps, the parameters of one rank being others in the first."""
    check = StalenessCheck(torch.device("cpu"), topology.mesh.get_group(), at_once=False)
    module = nn.Linear(2, 2, bias=False)
    group = ParameterGroup("", [module], [(module, "weight")], 0)
    stopped = []
    for step in range(2):
        parameters = torch.arange(4.0)
        check.filled(group, parameters)
        if topology.rank == stale_rank and step == 0:
            parameters[1] += 1
        check.check(group, parameters, None)
        try:
            check.raise_if_found()
            stopped.append(False)
        except StaleCacheError:
            stopped.append(True)
    return stopped


@pytest.mark.parametrize("stale_rank", [pytest.param(0, marks=pytest.mark.slow), 3, -1])
def test_what_one_rank_finds_stops_all_of_them(pool: Pool, stale_rank: int) -> None:
    found = stale_rank >= 0
    assert pool.run((2, 2), _check_as_on_cuda, stale_rank) == [[found, False]] * 4
