"""Work that shares processor cores: how much slower each kind gets beside the others.

Adam and I/O always run on the host's cores. Where the CPU is the device, computing and copying do too.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fuyou.schedule.tasks import Resource


@dataclass(frozen=True)
class Contention:
    """Speeds of work beside other work, as a part of its speed alone."""

    speeds: dict[frozenset[Resource], dict[Resource, float]] = field(default_factory=dict)
    """By what runs at the same time, two or more; measured. What was not measured together goes, beside each of the
    others, at the product of its speeds in pairs, and at full speed where no pair was measured either."""

    def speed(self, resource: Resource, running: Collection[Resource]) -> float:
        """Of work on ``resource`` while all of ``running``, itself among them, are at work."""
        running = frozenset(running)
        if running not in self._known:
            self._known[running] = {one: self._speed(one, running) for one in running}
        return self._known[running][resource]

    @cached_property
    def _known(self) -> dict[frozenset[Resource], dict[Resource, float]]:
        return {}

    def _speed(self, resource: Resource, running: frozenset[Resource]) -> float:
        if running in self.speeds:
            return self.speeds[running][resource]
        run_on_all_ranks = max(
            (known for known in self.speeds if resource in known and known < running), key=len, default=frozenset()
        )
        speed = self.speeds[run_on_all_ranks][resource] if run_on_all_ranks else 1.0
        for other in running - run_on_all_ranks - {resource}:
            speed *= self.speeds.get(frozenset({resource, other}), {}).get(resource, 1.0)
        return speed

    def to_list(self) -> list[dict[str, float]]:
        """What JSON can carry: one object for each combination."""
        return [{one.value: speed for one, speed in speeds.items()} for speeds in self.speeds.values()]

    @staticmethod
    def from_list(content: Any) -> "Contention":
        """What :meth:`to_list` described.

        Raises:
            ValueError: it is something else.
        """
        try:
            measured = [{Resource(name): float(speed) for name, speed in one.items()} for one in content]
        except (AttributeError, TypeError) as error:
            raise ValueError(f"not speeds beside other work: {error}") from error
        if not all(0 < speed < 100 for one in measured for speed in one.values()):
            raise ValueError(f"not speeds beside other work: {content}")
        return Contention({frozenset(one): one for one in measured})
