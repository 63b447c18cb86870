"""Write files atomically, read the kernel's list of mounts and the package's presets, and cache small results."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from common.errors import UserError, did_you_mean
from common.hub import is_hub_name

TEMPORARY_SUFFIX = ".tmp"  # End of the name under which a file is written until it is complete


def replace_file(
    path: Path, content: str | bytes, *, durable: bool = True, suffix: str = TEMPORARY_SUFFIX
) -> None:
    """Write ``content`` to a temporary file next to ``path``, and rename that to ``path``.

    Args:
        durable: sync the file before the rename, and its directory after it. Without: for what is checked when it is
            read, or written again soon.
        suffix: what the temporary file's name has behind that of ``path``; several writers need one each.
    """
    temporary = path.with_name(path.name + suffix)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            rest = memoryview(content.encode() if isinstance(content, str) else content)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


@contextmanager
def file_when_complete(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file next to ``path`` for one process that is synced and renamed to ``path`` at a clean end."""
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def copy_into(folder: Path, source: Path) -> None:
    """Copy a file, or a directory with all in it, into ``folder``, which :func:`sync_tree` makes durable later."""
    if source.is_dir():
        shutil.copytree(source, folder / source.name, dirs_exist_ok=True)
    else:
        shutil.copyfile(source, folder / source.name)


def sync(path: Path) -> None:
    """Make a file, or the names in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Make a directory and everything in it durable."""
    for path in folder.iterdir():
        if path.is_symlink():
            continue  # a name, which its directory holds
        if path.is_dir():
            sync_tree(path)
        else:
            sync(path)
    sync(folder)


def distinct_paths(paths: Iterable[Path]) -> list[Path]:
    """Return the paths without those that name what an earlier one does, through links or from another directory."""
    names: dict[Path, Path] = {}
    for path in paths:
        names.setdefault(path.resolve(), path)
    return list(names.values())


def make_directory(path: Path) -> None:
    """Make a directory and its parents, as far as they are not there, durably."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


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
    """Decode spaces and the like, which come as ``\\040``; everything else stays, in any alphabet."""
    raw = text.encode(errors="surrogateescape").decode("unicode_escape").encode("latin-1")
    return raw.decode(errors="surrogateescape")


def check_data_file(name: str) -> None:
    """Reject the path of a data file that does not exist; other names of data are left to those who read them."""
    path = Path(name).expanduser()
    is_path = os.sep in name or path.suffix
    is_pattern = any(mark in name for mark in "*?[")
    is_known = path.exists() or Path(name.split(":")[0]).expanduser().is_dir()
    may_be_on_hub = not path.parent.is_dir() and is_hub_name(name.split(":")[0]) and not path.suffix
    if is_path and not (is_pattern or is_known or may_be_on_hub):
        raise no_data_file(name)


def no_data_file(name: str) -> UserError:
    """Return the error for a data file that does not exist."""
    return UserError(f"There is no data file {name!r}.{nearest_path(Path(name))}")


def check_path(option: str, path: Path | None) -> None:
    """Reject the path of a file or directory that an option names and that does not exist."""
    if path is not None and not path.expanduser().exists():
        raise UserError(f"{option}: there is no file or directory '{path}'.{nearest_path(path)}")


def check_output(option: str, path: Path) -> None:
    """Reject a directory that cannot be made, before anything slow."""
    path = path.expanduser().absolute()
    try:
        parent = next(each for each in (path, *path.parents) if each.exists())
    except OSError as error:
        raise UserError(f"{option}: the directory {path} cannot be created: {error.strerror}.") from error
    if path.is_symlink() and not path.exists():
        raise UserError(
            f"{option}: {path} is a link to {path.readlink()}, where nothing is: make that directory."
        )
    if not parent.is_dir():
        raise UserError(f"{option}: {parent} is not a directory.")
    if not os.access(parent, os.W_OK):
        raise UserError(f"{option}: {parent} cannot be written to.")


def nearest_path(path: Path) -> str:
    """Return `` Did you mean 'x'?`` for the most similar name in the directory of ``path``, or an empty string."""
    path = path.expanduser().absolute()
    siblings = [each for each in path.parent.iterdir() if each != path] if path.parent.is_dir() else []
    # Names that have only their extension in common are not similar.
    return did_you_mean(path.name, [each.name for each in siblings if did_you_mean(path.stem, [each.stem])])


def preset_files(kind: str, extension: str = ".toml") -> dict[str, Path]:
    """Return the file of every preset in ``configs/<kind>``, by name; they are data of the installed package."""
    # Not by import: a user's own `configs` may come first
    folder = Path(__file__).parents[1] / "configs" / kind
    return {
        file.name.removesuffix(extension): file for file in folder.iterdir() if file.name.endswith(extension)
    }


_UNFINISHED_S = 600  # Seconds after which a file of the cache that is not complete yet never will be
CACHE_VARIABLE = "FINETUNE_CACHE"  # Name of the environment variable that gives the cache another directory


def cache_directory() -> Path:
    """Return the cache: ``$FINETUNE_CACHE``, else ``$XDG_CACHE_HOME/finetune``, else ``~/.cache/finetune``."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "finetune"
    return Path(os.environ.get(CACHE_VARIABLE) or usual)


def read_cached(kind: str, key: dict[str, Any], version: int) -> dict[str, Any] | None:
    """Return what was written under ``key``, all that it depends on, in this format version; None: nothing intact."""
    try:
        content = json.loads(cached_path(kind, key).read_text(encoding="utf-8"))
        return dict(content) if content["format"] == version and content["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_cached(kind: str, key: dict[str, Any], version: int, **content: Any) -> None:
    """Write ``content`` for :func:`read_cached`; where the directory cannot be written to, nothing is cached."""
    path = cached_path(kind, key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        for unfinished in path.parent.glob(f"*{TEMPORARY_SUFFIX}"):
            if _is_abandoned(unfinished):
                unfinished.unlink(missing_ok=True)
        text = json.dumps({"format": version, "key": key, **content}, indent=1)
        replace_file(path, text, durable=False, suffix=f".{os.getpid()}{TEMPORARY_SUFFIX}")


def _is_abandoned(unfinished: Path) -> bool:
    """Return whether the process that was writing a file of the cache was killed."""
    writer = unfinished.name.removesuffix(TEMPORARY_SUFFIX).rpartition(".")[2]
    # On a shared cache the writer may run on another machine. It then fails to rename, and caches nothing.
    is_running = writer.isdecimal() and psutil.pid_exists(int(writer))
    return not is_running or time.time() - unfinished.stat().st_mtime > _UNFINISHED_S


def cached_path(kind: str, key: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_directory() / kind / f"{digest[:24]}.json"


FILE_BYTES = 256 << 20  # Largest size of a small file: a tokenizer of a million words takes 50 MB


def read_text_file(path: Path, limit: int = FILE_BYTES) -> str:
    """Return the content of a small UTF-8 file that somebody else may have written.

    Args:
        path: of a regular file: pipes and devices, whose content need not end, are not read.
        limit: the most bytes that it may have.

    Raises:
        OSError: it cannot be opened or read, is no regular file, or is larger.
        UnicodeDecodeError: it is not UTF-8.
    """
    check_regular(path)
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit:,} bytes, the most for such a file", str(path))
    return content.decode()


# Parts of a large file that are hashed, evenly spaced, and bytes of each
_SAMPLES = 64
_SAMPLE_BYTES = 1 << 16


def sampled_digest(file: Path, size: int) -> str:
    """Return a hash of a file of ``size`` bytes; of a large one, of 4 MiB of it, which nearly any exchange changes."""
    digest = hashlib.sha256()
    with file.open("rb") as content:
        for start in range(0, size, max(_SAMPLE_BYTES, size // _SAMPLES)):
            content.seek(start)
            digest.update(content.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def check_regular(path: Path) -> None:
    """Raise OSError for what is neither a regular file nor a link to one, before it is opened."""
    if not stat.S_ISREG(path.stat().st_mode):
        kind = "a directory" if path.is_dir() else "a pipe, a socket, or a device"
        raise OSError(errno.EINVAL, f"it is not a regular file, but {kind}", str(path))
