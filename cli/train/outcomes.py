"""How a node's ranks have ended: each tells its launcher in an anonymous memory file, of which no crash leaves a trace.

A rank opens the launcher's file by its path below ``/proc`` and adds a line for every start, and one with its outcome
before it ends in an orderly way.
"""

import json
import os
from dataclasses import asdict, dataclass

_VARIABLE = "FINETUNE_OUTCOMES"
"""Environment variable: the paths of the files, in the order of the node's ranks."""
_STARTED = "started"


@dataclass(frozen=True)
class Outcome:
    """How a rank ended."""

    status: int
    """That the command should end with."""
    message: str = ""
    """For the user, if not 0."""


class RankOutcomes:
    """A launcher's files.

    Args:
        ranks: of this node.
    """

    def __init__(self, ranks: int) -> None:
        self._descriptors = [os.memfd_create("finetune-outcome", os.MFD_CLOEXEC) for _ in range(ranks)]

    @property
    def variables(self) -> dict[str, str]:
        """What the ranks have to find in their environment."""
        return {_VARIABLE: os.pathsep.join(f"/proc/{os.getpid()}/fd/{one}" for one in self._descriptors)}

    def read(self) -> list[Outcome]:
        """Of the ranks that have ended in an orderly way in their last start."""
        last = [_lines(os.pread(one, os.fstat(one).st_size, 0))[-1:] for one in self._descriptors]
        return [Outcome(**json.loads(line)) for lines in last for line in lines if line != _STARTED]

    def __enter__(self) -> "RankOutcomes":
        return self

    def __exit__(self, *exception: object) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)


class OwnOutcome:
    """A rank's file, which notes its start."""

    def __init__(self) -> None:
        path = os.environ[_VARIABLE].split(os.pathsep)[int(os.environ["LOCAL_RANK"])]
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        before = _lines(os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0))
        self.restarts = before.count(_STARTED)
        """How often this launcher has started the rank before. (PyTorch's agent does not count what others caused.)"""
        self._add(_STARTED)

    def leave(self, outcome: Outcome) -> None:
        """Tell the launcher."""
        self._add(json.dumps(asdict(outcome)))

    def _add(self, line: str) -> None:
        os.write(self._descriptor, line.encode() + b"\n")


def _lines(data: bytes) -> list[str]:
    return data.decode().splitlines()
