"""The directories of a store: checks before they are filled, and which is which when the store is opened again."""

import contextlib
import errno
import fcntl
import os
import shlex
import shutil
import stat
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.errors import FinetuneError, UserError
from common.files import TEMPORARY_SUFFIX
from common.store.errors import StoreError, describe_os_error, described, opened
from common.store.layout import ALIGNMENT, Layout
from common.store.manifest import MANIFEST_FILE, read_sealed, sync_directory, write_sealed
from common.units import format_bytes

IDENTITY_FILE = "store.json"
FORMAT = 1  # Version of the format of the directories. Any other is refused, not guessed at.

SMALL_FILES_BYTES = 1 << 20  # Bytes for identity and manifest, each twice while it is replaced


@dataclass(frozen=True)
class Identity:
    """What each directory says about itself in ``store.json``."""

    store: str  # Random name of the store, equal in all of its directories
    index: int  # Number of this directory, from 0; stripe k lies in number k % count
    count: int  # Number of directories of the store
    complete: bool  # Whether the store was created completely; else it holds nothing of value
    layout: Layout  # Place of every extent
    # Names of the stores that this one replaces, or has replaced, with spaces between them
    replaces: str = ""

    def write(self, directory: Path) -> None:
        """Write the identity into ``directory``, atomically."""
        content = {"format": FORMAT, **vars(self), "layout": self.layout.to_dict()}
        write_sealed(directory / IDENTITY_FILE, content)

    @classmethod
    def read(cls, directory: Path) -> "Identity | None":
        """Read the identity in ``directory``, which must be intact and of this format; None if it holds no store."""
        content: dict[str, Any] | None = read_sealed(directory / IDENTITY_FILE)
        if content is None:
            return None
        version = content.pop("format", None)
        if version != FORMAT:
            raise UserError(
                f"{directory} holds a run in format {version}, and this version of the program reads format {FORMAT}. "
                "Continue it with the version that began it, or take another directory."
            )
        try:
            content["layout"] = Layout.from_dict(content["layout"])
            identity = cls(**content)
            if not 0 <= identity.index < identity.count == identity.layout.directories:
                raise ValueError(f"directory {identity.index} of {identity.count}")
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise StoreError(
                f"{directory / IDENTITY_FILE} does not describe a store ({error}), so it was edited: restore it from a "
                f"copy, or remove {directory} and begin again with --overwrite."
            ) from error
        return identity


def create_directories(
    directories: Sequence[Path], layout: Layout, overwrite: bool, replaces: str = ""
) -> tuple[list[Path], Identity]:
    """Check everything; only then fill ``directories`` with preallocated files and identities, or with nothing."""
    paths = usable_directories(directories)
    if len(paths) != layout.directories:
        raise ValueError(f"the layout is for {layout.directories} directories, and {len(paths)} were given")
    replaceable = [_replaceable_files(path, layout, overwrite) for path in paths]
    freed = _freed_by(file for files in replaceable for file in files)
    check_space(paths, sum(layout.file_bytes().values()), freed, "for the store")
    remove(paths)

    identity = Identity(uuid.uuid4().hex, 0, len(paths), False, layout, replaces)
    identities = [replace(identity, index=index) for index in range(len(paths))]
    try:
        for path, own_identity in zip(paths, identities, strict=True):
            own_identity.write(path)
            for name, nbytes in layout.file_bytes().items():
                _make_file(path / name, nbytes)
            sync_directory(path)
        for path, own_identity in zip(paths, identities, strict=True):
            replace(own_identity, complete=True).write(path)
    except BaseException:
        with contextlib.suppress(FinetuneError):  # what went wrong first is what the user should hear
            remove(paths)
        raise
    return paths, replace(identity, complete=True)


def find_directories(directories: Sequence[Path], writes: bool = True) -> tuple[list[Path], Identity]:
    """Return the directories of one store, whole, in the order of their indices, and the identity of the first.

    Args:
        directories: in any order.
        writes: whether its files will be written to, so that they must be no other store's.
    """
    paths = usable_directories(directories, writes)
    identities = {}
    for path in paths:
        identity = Identity.read(path)
        if identity is None:
            others = [other for other in paths if other.is_dir() and Identity.read(other) is not None]
            if others:
                raise UserError(
                    f"{path} holds no run to continue, as {', '.join(map(str, others))} does. If its drive is not "
                    "mounted, mount it; else correct --ssd."
                )
            raise UserError(
                f"{path} holds no run to continue. Check --ssd, or leave out --resume to begin a new run."
            )
        if not identity.complete:
            raise UserError(
                f"The store in {path} was never finished: begin a new run there, without --resume."
            )
        identities[path] = identity

    by_index: dict[int, Path] = {}
    first = identities[paths[0]]
    for path, identity in identities.items():
        if identity.store != first.store or identity.index in by_index:
            raise UserError(
                f"{path} and {by_index.get(identity.index, paths[0])} belong to different runs, or one is a copy of "
                "the other. Give --ssd the directories of one run."
            )
        by_index[identity.index] = path
    if missing := sorted(set(range(first.count)) - set(by_index)):
        numbers = ", ".join(str(index + 1) for index in missing)
        raise UserError(
            f"The run in {', '.join(map(str, paths))} is striped over {first.count} directories, and number {numbers} "
            f"is not among those given. Mount its drive, if it is not mounted, and give all {first.count} with --ssd, "
            "in any order. To do without a drive from now on, give the others with --ssd and that one with "
            "--leave-ssd. If it is lost, so is the run: it has a part that no other drive has. Begin again with "
            "--overwrite, or from a copy."
        )
    ordered = [by_index[index] for index in range(first.count)]
    lost = [
        path / name for path in ordered for name in first.layout.file_bytes() if not (path / name).exists()
    ]
    if lost and not any((path / MANIFEST_FILE).exists() for path in ordered):
        # The order in which `remove` works
        raise UserError(
            f"What is in {lost[0].parent} is no longer a run: it has moved, or its removal was interrupted, or it was "
            "never finished. Name the drives that it has moved to with --ssd, or begin a new run with --overwrite."
        )
    if lost:
        raise StoreError(
            f"{lost[0]} is gone, and the run cannot be continued without it. Restore it from a copy of that time, or "
            "begin again with --overwrite, from a checkpoint (--model) if there is one."
        )
    for path in ordered:
        for name, nbytes in first.layout.file_bytes().items():
            file = path / name
            with described("opening", file):
                size = file.stat().st_size
            if size != nbytes or size % ALIGNMENT:
                raise StoreError(
                    f"{file} has {size:,} bytes instead of {nbytes:,}: it was changed by something else. Restore it "
                    "from a copy of that time, or begin again with --overwrite, from a checkpoint (--model) if there "
                    "is one."
                )
            if writes:
                _refuse_links(file)
    return ordered, identities[ordered[0]]


def _refuse_links(file: Path) -> None:
    """Refuse a store's file that has another name, too: what is written to it would be written to another store."""
    status = file.lstat()
    name = shlex.quote(str(file))
    if stat.S_ISLNK(status.st_mode) or status.st_nlink > 1:
        how = (
            f"a link to {file.resolve()}"
            if stat.S_ISLNK(status.st_mode)
            else "linked elsewhere (as by cp -l)"
        )
        raise UserError(
            f"{file} is {how}, so to continue here would change that run, too. Give this run a file that is not: "
            f"cp {name} {name}.new && mv {name}.new {name}. Then enter the command again."
        )


def remove(directories: Iterable[Path]) -> None:
    """Delete the files of the stores that ``directories`` hold; a directory without one is left alone.

    The manifest goes first and the identity last, so that an interrupted removal is never resumed from and can be
    repeated.
    """
    for directory in map(Path, directories):
        identity = Identity.read(directory)
        if identity is None:
            continue
        files = identity.layout.file_bytes()
        temporary = [name + TEMPORARY_SUFFIX for name in (*files, MANIFEST_FILE, IDENTITY_FILE)]
        # Each group is gone for good before the next one goes, so that a power cut does not change their order.
        for names in ([MANIFEST_FILE], [*temporary, *files], [IDENTITY_FILE]):
            for name in names:
                with described("removal", directory / name):
                    (directory / name).unlink(missing_ok=True)
            sync_directory(directory)


def usable_directories(directories: Sequence[Path], writable: bool = True) -> list[Path]:
    """Return the directories as paths, or refuse one that does not exist, is not ``writable``, or is given twice."""
    if not directories:
        raise UserError("A store needs at least one directory: give --ssd.")
    seen: dict[tuple[int, int], Path] = {}
    for path in map(Path, directories):
        try:
            status = path.stat()
        except FileNotFoundError:
            raise UserError(
                f"There is no directory {path}. Make it (mkdir -p {path}) or correct --ssd."
            ) from None
        except OSError as error:
            raise UserError(f"{path} cannot be used: {error.strerror}. Correct --ssd.") from None
        if not path.is_dir():
            raise UserError(f"{path} is not a directory. Give --ssd a directory on each drive.")
        if writable and not os.access(path, os.R_OK | os.W_OK | os.X_OK):
            raise UserError(f"{path} is not writable. Change its owner or mode, or choose another directory.")
        key = status.st_dev, status.st_ino
        if key in seen:
            both = (
                f"{path} is given twice"
                if seen[key] == path
                else f"{path} and {seen[key]} are the same directory"
            )
            raise UserError(f"{both}. Give each drive once.")
        seen[key] = path
    return list(seen.values())


def _replaceable_files(directory: Path, layout: Layout, overwrite: bool) -> list[Path]:
    identity = Identity.read(directory)
    if identity is not None and identity.complete and not overwrite:
        raise UserError(
            f"{directory} holds a run already: add --resume to continue it or --overwrite to replace it."
        )
    ours = [directory / name for name in identity.layout.file_bytes()] if identity else []
    for name in [*layout.file_bytes(), *([] if identity else [MANIFEST_FILE])]:
        if (directory / name) not in ours and os.path.lexists(directory / name):
            raise UserError(
                f"{directory} holds a file {name} that belongs to no run. Move it, or take an empty directory."
            )
    return ours


def _freed_by(files: Iterable[Path]) -> dict[int, int]:
    """Return the bytes that the removal of ``files`` would free, by the number of their device."""
    freed: dict[int, int] = defaultdict(int)
    for status in (file.stat() for file in files if file.exists()):
        freed[status.st_dev] += status.st_blocks * 512
    return freed


def check_space(paths: Sequence[Path], nbytes: int, freed: Mapping[int, int], what: str) -> None:
    """Refuse too little space on a file system, of which several directories may share one.

    Each of ``paths``, or its parent, takes ``nbytes`` and small files; ``freed`` has bytes to be free, by device.
    """
    sharing: dict[int, list[Path]] = defaultdict(list)
    existing = {path: path if path.exists() else path.parent for path in paths}
    for path in paths:
        sharing[existing[path].stat().st_dev].append(path)
    problems = []
    for device, there in sharing.items():
        needed = (nbytes + SMALL_FILES_BYTES) * len(there)
        free = shutil.disk_usage(existing[there[0]]).free + freed.get(device, 0)
        if needed > free:
            where = " and ".join(map(str, there)) + (" together" if len(there) > 1 else "")
            sizes = [
                f"{format_bytes(count)} {what} ({count:,} bytes)"
                for count, what in ((needed, "needed"), (free, "free"))
            ]
            problems.append(f"{where}: {', '.join(sizes)}")
    if problems:
        raise UserError(
            f"Too little space {what}. {'; '.join(problems)}. Nothing was written. Free some space, or "
            "give --ssd more or larger drives."
        )


def _make_file(path: Path, nbytes: int) -> None:
    """Make the file ``path`` with its space, so that no later write finds the drive full; durably."""
    with opened(
        path, f"preallocating {format_bytes(nbytes)}", os.O_RDWR | os.O_CREAT | os.O_EXCL
    ) as descriptor:
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            os.ftruncate(descriptor, nbytes)  # a file system that cannot: the space check must do
        os.fsync(descriptor)


PATIENCE_SECONDS = 5.0  # Seconds to wait for processes of a run that was just killed

# Error numbers of network file systems that lock files which are open for writing, but no directories.
_UNSUPPORTED = (errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
LOCK_FILE = ".lock"  # Name of the file that is locked, and stays, where a directory cannot be locked


class DirectoryLock:
    """A lock on ``directories`` (``flock``: a crash leaves no file) until its last owner, or the optimizer process,
    ends."""

    def __init__(self, directories: Iterable[Path], patience: float = PATIENCE_SECONDS) -> None:
        # Descriptors of the locks: a process that gets them is an owner, too
        self.descriptors: list[int] = []
        try:
            self.add(directories, patience)
        except BaseException:
            self.close()
            raise

    def add(self, directories: Iterable[Path], patience: float = PATIENCE_SECONDS) -> None:
        """Lock these directories as well. Raises as the class does."""
        deadline = time.monotonic() + patience
        for directory in directories:
            self.descriptors.append(_lock(directory, deadline))

    def close(self) -> None:
        """Release the lock; other owners may still hold it. Calling it again does nothing."""
        while self.descriptors:
            os.close(self.descriptors.pop())

    def __enter__(self) -> "DirectoryLock":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _lock(directory: Path, deadline: float) -> int:
    descriptor = -1
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            except BlockingIOError:
                if time.monotonic() > deadline:
                    here = (
                        ""
                        if FinetuneError.names_flags
                        else "; in this process, close() what is open there first"
                    )
                    raise UserError(
                        f"{directory} is in use by another run. Wait until that has ended, or take another directory"
                        f"{here}."
                    ) from None
                time.sleep(0.02)
            except OSError as error:
                if error.errno not in _UNSUPPORTED or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
                    raise
                os.close(descriptor)
                descriptor = -1
                descriptor = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except BaseException as error:
        if descriptor >= 0:
            os.close(descriptor)
        if isinstance(error, OSError):
            raise describe_os_error("locking", directory, error) from error
        raise
