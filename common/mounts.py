"""What is mounted where, as the kernel tells in ``/proc/<pid>/mountinfo`` (proc_pid_mountinfo(5))."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mount:
    """One line of it."""

    root: str
    """What of the file system is mounted: ``/`` for all of it."""
    point: str
    """Where."""
    device: str
    """Major and minor number: ``259:2``."""
    file_system: str
    source: str
    options: str
    """Of the file system, with commas."""


def mounts(file: Path) -> Iterator[Mount]:
    """The mounts that ``file`` lists, older ones first; none where it is absent or closed to us."""
    try:
        lines = file.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        mount, _, rest = line.partition(" - ")
        fields, (kind, source, options) = mount.split(" "), rest.split(" ", 2)
        yield Mount(_unescaped(fields[3]), _unescaped(fields[4]), fields[2], kind, source, options)


def _unescaped(text: str) -> str:
    """Spaces and the like come as ``\\040``; everything else, whatever the alphabet, as it is."""
    raw = text.encode(errors="surrogateescape").decode("unicode_escape").encode("latin-1")
    return raw.decode(errors="surrogateescape")
