"""How a node's ranks have ended: each writes that for its launcher into an anonymous memory file.

A rank opens the launcher's file by its path below ``/proc`` and adds a line for every start, and one with its outcome
before it ends in an orderly way. A memory file leaves no trace after a crash.
"""

import json
import os
from dataclasses import asdict, dataclass

_VARIABLE = "FINETUNE_OUTCOMES"
"""Environment variable with the paths of the files, in the order of the node's ranks."""
_STARTED = "started"


@dataclass(frozen=True)
class Outcome:
    """Outcome of a rank that ended in an orderly way."""

    status: int
    """Exit status that the command should have."""
    message: str = ""
    """Message for the user, where the status is not 0."""


class RankOutcomes:
    """A launcher's memory files, one for each rank.

    Args:
        ranks: how many ranks this node has.
    """

    def __init__(self, ranks: int) -> None:
        self._descriptors = [os.memfd_create("finetune-outcome", os.MFD_CLOEXEC) for _ in range(ranks)]

    @property
    def variables(self) -> dict[str, str]:
        """Variables that the ranks have to find in their environment."""
        return {_VARIABLE: os.pathsep.join(f"/proc/{os.getpid()}/fd/{one}" for one in self._descriptors)}

    def read(self) -> list[Outcome]:
        """Return the outcomes of the ranks that have ended in an orderly way in their last start."""
        last = [_lines(os.pread(one, os.fstat(one).st_size, 0))[-1:] for one in self._descriptors]
        return [Outcome(**json.loads(line)) for lines in last for line in lines if line != _STARTED]

    def __enter__(self) -> "RankOutcomes":
        return self

    def __exit__(self, *exception: object) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)


class OwnOutcome:
    """A rank's own memory file, in which it notes its start."""

    def __init__(self) -> None:
        path = os.environ[_VARIABLE].split(os.pathsep)[int(os.environ["LOCAL_RANK"])]
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        before = _lines(os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0))
        self.restarts = before.count(_STARTED)
        """How often this launcher has started the rank before. (PyTorch's agent does not count what others caused.)"""
        self._add(_STARTED)

    def leave(self, outcome: Outcome) -> None:
        """Write the outcome for the launcher."""
        self._add(json.dumps(asdict(outcome)))

    def _add(self, line: str) -> None:
        os.write(self._descriptor, line.encode() + b"\n")


def _lines(data: bytes) -> list[str]:
    return data.decode().splitlines()
