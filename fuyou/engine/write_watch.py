"""Notice drives that write slower than planned, such as those whose fast cache is full."""

import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, replace

from common.units import Interval, merge, total
from fuyou.planner import RunPlan
from fuyou.planner.profiling import Profile, save
from fuyou.runtime.ranks import Agreement

_STEPS = 3  # Steps over which the rate of writes is averaged, and averages in a row that must be low
SLOWER = 0.7  # A rate below this fraction of the planned rate is another rate, and no noise


class WriteWatch:
    """Watches the drives of one rank.

    Args:
        profile: profile that the run was planned with.
        context: what it is the profile of.
        ranks: ranks that share its drives evenly.

    Attributes:
        slow_rate: bytes per second that this rank writes, once that has become slow; else None.
    """

    def __init__(self, profile: Profile, context: RunPlan, ranks: int):
        self.slow_rate: float | None = None
        self._profile = profile
        self._context = context
        self._ranks = ranks
        self._planned = profile.write_bytes_per_second / ranks
        self._read_rate = profile.read_bytes_per_second / ranks
        self._steps: deque[tuple[list[Interval], int, int]] = deque(maxlen=_STEPS)
        self._bytes = (0, 0)  # Bytes read and written until the last step
        self._slow_averages = 0  # In a row
        self._warned = False

    @classmethod
    def of_run(cls, context: RunPlan, agreement: Agreement) -> "WriteWatch | None":
        """Return a watch with the profile of the first rank, which has chosen for all. Collective.

        None without a profile, and where a CPU computes: it takes cores from the threads that write, so that a low rate
        says nothing about the drives.
        """
        share = context.job.layout.share
        profile = context.profile if share.rank == 0 else None
        content = agreement.all_gather_object(profile and asdict(profile))[0]
        if content is None or context.device.shares_host_memory:
            return None
        return cls(Profile(**content), context, share.ranks_per_node)

    def step(self, busy: list[Interval], moved: tuple[int, int]) -> None:
        """Take note of when the drives were busy in a step, and of all bytes read and written until now."""
        read, written = (now - before for now, before in zip(moved, self._bytes, strict=True))
        self._bytes = moved
        self._steps.append((busy, read, written))
        if self.slow_rate is not None or len(self._steps) < _STEPS:
            return
        spans, reads, writes = zip(*self._steps, strict=True)
        # Steps overlap: what is written back in one is reported with the next.
        seconds = total(merge([span for step in spans for span in step])) - sum(reads) / self._read_rate
        slow = 0 < sum(writes) < SLOWER * self._planned * seconds
        self._slow_averages = self._slow_averages + 1 if slow else 0
        if self._slow_averages == _STEPS:  # no average has a step from before
            self.slow_rate = sum(writes) / seconds

    def note(self, rates: Sequence[float | None]) -> None:
        """On the first rank, warn once if a rank's drives have become slow, and let the next plan count on that.

        Args:
            rates: every rank's :attr:`slow_rate`.
        """
        slow = [(rate, rank) for rank, rate in enumerate(rates) if rate is not None]
        if self._warned or not slow or self._context.job.layout.share.rank:
            return
        self._warned = True
        rate, rank = min(slow)
        of = f" of rank {rank}" if len(rates) > 1 else ""
        warnings.warn(
            f"The drives{of} write {rate / 1e9:.3g} GB/s, and {self._planned / 1e9:.3g} GB/s were planned: their fast "
            "cache is full, or they are hot. The next plan counts on the lower rate.",
            stacklevel=2,
        )
        corrected = replace(self._profile, write_bytes_per_second=rate * self._ranks)
        save(corrected, self._context.workload, self._context.device)
