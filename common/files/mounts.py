"""Read the kernel's list of mounts, ``/proc/<pid>/mountinfo`` (proc_pid_mountinfo(5))."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mount:
    """A mounted file system."""

    root: str  # Directory of the file system that is mounted: `/` for all of it
    point: str  # Directory at which it is mounted
    device: str  # Major and minor number: `259:2`
    file_system: str
    source: str
    options: str  # Options of the file system, separated by commas


def mounts(file: Path) -> Iterator[Mount]:
    """Yield the mounts that ``file`` lists, older ones first; none where it is absent or not readable."""
    try:
        lines = file.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        mount, _, rest = line.partition(" - ")
        fields, (kind, source, options) = mount.split(" "), rest.split(" ", 2)
        yield Mount(_unescaped(fields[3]), _unescaped(fields[4]), fields[2], kind, source, options)


def _unescaped(text: str) -> str:
    """Decode spaces and the like, which come as ``\\040``; all else, whatever the alphabet, stays as it is."""
    raw = text.encode(errors="surrogateescape").decode("unicode_escape").encode("latin-1")
    return raw.decode(errors="surrogateescape")
