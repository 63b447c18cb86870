"""Measuring the cluster at hand: apart from what plans and checks a strategy, which need not import it."""

from cli.job.strategy import PROFILE
from cli.options.settings import Settings
from common.models.presets import load_config
from fcdp.planner.profiling import profile_cluster
from fcdp.planner.rates import MeasuredRates
from fcdp.strategy.topology import Topology


def measure_cluster(settings: Settings, topology: Topology, rows: int, seq_len: int) -> MeasuredRates:
    """Measure the cluster, and have rank 0 write :data:`PROFILE` in the output directory. Collective.

    Args:
        settings: of the command.
        topology: the ranks.
        rows, seq_len: shape of a rank's micro-batch.
    """
    config, _ = load_config(settings.model)

    def say(what: str) -> None:
        if topology.rank == 0 and not settings.quiet:
            print(f"measuring {what}", flush=True)

    path = settings.output_directory / PROFILE
    return profile_cluster(topology, config, path, rows=rows, seq_len=seq_len, dtype=settings.dtype, say=say)
