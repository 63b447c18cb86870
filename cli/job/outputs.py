"""The files in an output directory that belong to its run: they are listed, so that nothing else is replaced.

The list is ``run/files.json``, which has the size, the time, and a hash of each file. A new run sets aside what the
earlier run has listed before it changes anything else, and removes it once its own first step is committed; if it fails
before that and the earlier run's store is as it was, everything is put back (:mod:`cli.job.claim`).
"""

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from typing import Any

from cli.job.replaced import JOURNAL, move, remove_empty_folders, remove_replaced, set_aside, sync_folders
from cli.options.run_record import (
    COMMITS,
    CONFIG,
    DESCRIPTION,
    METRICS,
    REPLACED,
    RUN,
    STORE,
    TRACKERS,
    read_description,
    read_json,
)
from cli.options.settings import Settings
from common.errors import FinetuneError, UserError
from common.files import TEMPORARY_SUFFIX, make_directory, replace_file, sampled_digest, sync, sync_tree
from common.models.adapters.gguf_adapter import FILE as GGUF
from common.models.adapters.options import CONFIG as ADAPTER
from common.models.adapters.options import WEIGHTS
from common.models.checkpoint.shards import INDEX, SINGLE
from common.models.checkpoint.writer import STAGING_FOLDER, TOKENIZER_FILES
from common.store.errors import described

FILES = "files.json"  # Name of the list, next to the run's description
HISTORY_FILE = "losses.jsonl"  # File in the output directory; the same whenever the run is repeated
PAGE = "index.html"  # File in the run's directory to look at
# Folder of checkpoints, and what their names begin with
CHECKPOINTS = "checkpoints"
BEST = "best"
STEP = "step-"
BASE = "base"  # Folder with the language model as a classifier, before training
RESULT = "."  # Name of what a run writes into the output directory itself

_REFERENCES = ("reference.npz", "reference-held-out.npz")  # What dpo compares with, next to them
_LOGS = (
    HISTORY_FILE,
    *(f"{RUN}/{name}" for name in (METRICS, PAGE, *_REFERENCES, CONFIG, DESCRIPTION, FILES)),
)
"""Files that change with every step, and so have no size in the list. Its own file is the last to be set aside."""
RESULTS = (
    "config.json", "generation_config.json", "adapter_*", GGUF, "*.safetensors", "*.safetensors.index.json",
    "*model*.bin", "*model*.bin.index.json", "tf_model*", "flax_model*", *TOKENIZER_FILES,
)  # fmt: skip
"""Names of what transformers, peft, and llama.cpp load from a directory, whether this program writes it or not."""
ENTRY_POINTS = (SINGLE, INDEX, ADAPTER, "config.json")  # Without these, the rest is not loaded
_OWN = (
    *ENTRY_POINTS, "generation_config.json", WEIGHTS, "model-*-of-*.safetensors", "tokenizer.json",
    "tokenizer_config.json", "tokenizer.model", *TOKENIZER_FILES[1:],
)  # fmt: skip
"""Names of what earlier versions wrote, which did not list it. Other files are the user's."""
_FOLDERS = (REPLACED, RUN, CHECKPOINTS, BASE, STORE, COMMITS)  # What a run makes in an output directory
_PARTIAL = ".partial"  # End of the name of what is not complete
_RETIRED = ".old"  # End of the name, before that, of a folder that is about to be removed
# What a run makes
_FOLDER = re.compile(rf"({BASE}|{CHECKPOINTS}/({BEST}|{STEP}[0-9]+))({re.escape(_RETIRED)})?")

_LINK = "link to "  # Beginning of the hash of a link, before its target and the hash of that
_SUM = "checksum"  # Key in the list of a hash of the rest
_NOT_REGULAR = "not a regular file"  # Hash of any other thing, and of links in lists of earlier versions

State = tuple[int, int, str]  # Of a file: its size in bytes, its time in ns, and a hash


class Outputs:
    """What the run of an output directory has written there.

    Args:
        directory: the output directory.
        id: the run's.
        launch: id of the launcher that began the run; empty for a single process.
        files: the state of each file by its path inside the directory.
    """

    def __init__(self, directory: Path, id: str, launch: str = "", files: dict[str, State] | None = None):
        self.directory = directory
        self.id = id
        self.launch = launch
        # Whether the run has a commit, and nothing of an earlier one is set aside any more
        self.has_begun = False
        self.has_list = files is not None  # Whether there is a list that can be read
        self.is_edited = False  # Whether the list is not what a run wrote
        self._files = files or {}
        self._held: tuple[int, Settings] | None = None  # Descriptor of the directory, and of which run it is
        self.command: list[str] = []  # What writes the result again, of an export without a run

    @classmethod
    def read(cls, directory: Path) -> "Outputs":
        """Return what the run in ``directory`` has listed; that of an earlier version is known by its names."""
        content = read_json(directory / RUN / FILES)
        id = read_description(directory).get("id")
        if id and content.get("id", id) != id:
            content = {}  # the list of another run
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
            files = {
                str(name): (int(size), int(time), str(digest))
                for name, (size, time, digest) in content["files"].items()
            }
            outputs = cls(directory, str(content["id"]), str(content["launch"]), files)
            outputs.command = [str(word) for word in content.get("command", ())]
            outputs.is_edited = content.get(_SUM, _sum_of(content)) != _sum_of(content)
            return outputs
        outputs = cls(directory, str(id or ""))
        if outputs._is_of_earlier_version():
            folders = [
                path
                for path in _named(directory / CHECKPOINTS, "*")
                if _FOLDER.fullmatch(outputs._name(path))
            ]
            for folder in (directory, directory / BASE, *folders):
                for entry in _named(folder, _OWN):
                    outputs._add(entry, entry)
        return outputs

    def _is_of_earlier_version(self) -> bool:
        """Return whether a version that listed nothing wrote the description: since there is a list, it has an id."""
        description = read_json(self.directory / RUN / DESCRIPTION)
        return bool(description) and "id" not in description

    # -- what is there --------------------------------------------------------------------------------------------

    @property
    def files(self) -> Sequence[str]:
        """The listed files, by their paths inside the directory."""
        return list(self._files)

    @property
    def has_result(self) -> bool:
        """Return whether files of the result are listed."""
        return bool(self.listed(RESULT))

    def is_whole(self, name: str) -> bool:
        """Return whether all files that were listed for a folder are there as they were listed, by their content."""
        files = self.listed(name)
        return bool(files) and not self.faults(name)

    def faults(self, name: str | None = None) -> list[str]:
        """Return a sentence for each listed file, of a folder or of all, that is missing or has other content."""
        files = self._files if name is None else self.listed(name)
        return [sentence for file in files if (sentence := self.fault(file))]

    def fault(self, file: str) -> str:
        """Return a sentence about a listed file that is missing or has other content; empty if it is as listed."""
        path = self.directory / file
        what = "the run" if self._is_of_run else "finetune export"
        if not os.path.lexists(path):
            return f"{path} is missing."
        if path.is_symlink() and not path.exists():
            return f"{path} is a link to {os.readlink(path)}, where nothing is."
        if path.is_file() and not os.access(path, os.R_OK):
            return f"{path} cannot be read by this user: look at its owner and its permissions."
        return "" if self._is_intact(file, by_content=True) else f"{path} is not what {what} wrote there."

    def edits(self) -> list[str]:
        """Return a sentence if the list was edited: what it does not name any more is not compared."""
        path = self.directory / RUN / FILES
        return (
            [f"{path} was edited since it was written: copy that of the run back."] if self.is_edited else []
        )

    def damaged_folders(self) -> list[str]:
        """Return a sentence for each listed folder, checkpoints and others, that is not as it was listed."""
        names = dict.fromkeys(file.rpartition("/")[0] for file in self._files if "/" in file)
        return [sentences[0] for name in names if (sentences := self.faults(name))]

    def shadows(self, name: str) -> list[str]:
        """Return a sentence for each file that is not listed, and loaded in place of a listed result or with it."""
        listed = self.listed(name)
        entries = {file.rpartition("/")[2] for file in listed} & set(ENTRY_POINTS)
        folder = self.directory / name
        others = [
            folder / entry for entry in ENTRY_POINTS if entry not in entries and (folder / entry).exists()
        ]
        return [f"{other} is not from the run that wrote the rest there." for other in others if entries]

    def remedy(self, name: str) -> str:
        """Return a sentence about how to write a damaged result, or folder, again; empty if nothing can."""
        if name != RESULT:
            return ""
        if self._is_of_run:
            return f"To write the result again: finetune export --output {shlex.quote(str(self.directory))}."
        if not (self._files or self.command):
            return ""  # nor does anything tell that a merge was to be written
        words = self.command or ["finetune", "export", "--model", "BASE", "--adapter", "ADAPTER", "--output"]
        command = shlex.join(words if self.command else [*words, str(self.directory)])
        return f"Move what is damaged elsewhere, then write it again: {command}."

    @property
    def _is_of_run(self) -> bool:
        return (self.directory / RUN / DESCRIPTION).exists()

    def strays(self, *, saves: bool) -> list[str]:
        """Return a sentence for each file that is not listed, and would be loaded with those of the run.

        Args:
            saves: whether the run writes a result, next to which others must not be.
        """
        folders = [
            path for path in _named(self.directory / CHECKPOINTS, "*") if _FOLDER.fullmatch(self._name(path))
        ]
        entries = [
            entry for folder in (self.directory, *folders)[not saves :] for entry in _named(folder, RESULTS)
        ]
        files = [file for entry in entries for file in self._others(entry, is_mine=True)]
        return [
            f"{file} is not in {RUN}/{FILES}, and would be loaded with what the run wrote." for file in files
        ]

    def links(self, name: str) -> dict[Path, str]:
        """Return the targets of the links that were listed for a folder, each with the hash of its content then.

        It is that of now where the list has none, and empty where nothing is left of either.
        """
        targets = {}
        for file in self.listed(name):
            path = self.directory / file
            digest = self._files[file][2]
            if digest == _NOT_REGULAR and path.is_symlink():
                targets[path.readlink()] = content_digest(path)
            elif digest.startswith(_LINK):
                target, _, content = digest.removeprefix(_LINK).rpartition(": ")
                targets[Path(target)] = content
        return targets

    def checkpoints(self, last: float, after: int = 0) -> list[str]:
        """Return the names of the listed checkpoints of ``--save-every`` of steps ``after`` one and up to ``last``, the
        oldest first."""
        names = {file.split("/")[1] for file in self._files if file.startswith(f"{CHECKPOINTS}/{STEP}")}
        steps = sorted(int(name.removeprefix(STEP)) for name in names if re.fullmatch(rf"{STEP}[0-9]+", name))
        return [f"{CHECKPOINTS}/{STEP}{step}" for step in steps if after < step <= last]

    def check_for(self, settings: Settings, *, resumes: bool) -> None:
        """Refuse to write what the settings ask for: :meth:`check`."""
        self.check(
            resumes=resumes,
            overwrites=settings.overwrite,
            saves=settings.save,
            saves_checkpoints=settings.save_every is not None,
        )

    def check(self, *, resumes: bool, overwrites: bool, saves: bool, saves_checkpoints: bool) -> None:
        """Refuse to write where other files would be in the way of the run's, or the run's in theirs."""
        if not resumes:
            check_outside(self.directory)
        for folder in (self.directory / name for name in _FOLDERS):
            if folder.is_symlink():  # to another drive, or into another run's output
                check_outside(folder)
        listed = [
            file
            for file in self._files
            if (self.directory / file).exists() and not file.startswith(f"{BASE}/")
        ]
        is_run = self._is_of_run
        # Else an export was killed while it moved its files into place
        is_complete = is_run or self.is_whole(RESULT)
        if listed and is_complete and not (resumes or overwrites):
            what = (
                "a checkpoint"
                if "config.json" in listed
                else "adapters"
                if ADAPTER in listed
                else "checkpoints"
            )
            raise UserError(
                f"{self.directory} holds {what} already: give another --output, or add --overwrite to replace it"
                f"{' (or --resume to continue the run that made it)' if is_run else ''}."
            )
        for name in (RUN, CHECKPOINTS, BASE, REPLACED):
            if os.path.lexists(self.directory / name) and not (self.directory / name).is_dir():
                raise UserError(
                    f"{self.directory / name} is a file, and the run needs a folder of that name: move it elsewhere, "
                    "or give another --output."
                )
        entries = _named(self.directory, RESULTS) if saves else []
        entries += _named(self.directory / CHECKPOINTS, "*") if saves_checkpoints else []
        foreign = [file for entry in entries for file in self._others(entry, is_mine=resumes)]
        if not (resumes or is_run or (self.directory / RUN / FILES).exists()):
            foreign += [self.directory / name for name in self._logs()]
        if foreign:
            names = ", ".join(self._name(file) for file in foreign[:3])
            more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
            why = "which no run has written there, or which changed since"
            if is_run and not (self._files or self.has_list):
                what = f"{RUN}/{FILES}, the list of what the run there has written"
                why = f"and {what}, is missing or damaged, or of another run"
            raise UserError(
                f"{self.directory} holds {names}{more}, {why}: move that elsewhere, or give another --output."
            )

    def listed(self, name: str) -> list[str]:
        """Return the listed files of the result itself, or of a folder, by their paths inside the directory."""
        if name == RESULT:
            return [file for file in self._files if not file.startswith((f"{CHECKPOINTS}/", f"{BASE}/"))]
        return [file for file in self._files if file.startswith(f"{name}/")]

    def _logs(self) -> list[str]:
        trackers = map(self._name, _files_of(self.directory / RUN / TRACKERS))
        return [*trackers, *(name for name in _LOGS if (self.directory / name).exists())]

    def _is_intact(self, file: str, by_content: bool = False) -> bool:
        """Return whether a file is there as it was listed; in a copy, which has another time, by its content."""
        path = self.directory / file
        with contextlib.suppress(KeyError, OSError):
            size, time, digest = self._files[file]
            status = path.lstat()
            if status.st_size == size and stat.S_ISLNK(status.st_mode):
                if digest == _NOT_REGULAR:  # of an earlier version
                    return path.exists() or not by_content
                return _digest(path) == digest if by_content else digest.startswith(_link(path))
            if status.st_size == size:
                return (status.st_mtime_ns == time and not by_content) or _digest(path) == digest
        return False

    def _others(self, entry: Path, is_mine: bool) -> list[Path]:
        """Return the files of an entry that are not listed, or not as they were listed; ``is_mine``: the former."""
        known = self._files.__contains__ if is_mine else self._is_intact
        return [file for file in _files_of(entry) if not known(self._name(file))]

    def _changed(self, files: Iterable[str]) -> str:
        """Return the names of the listed files that are there, and not as they were listed."""
        return ", ".join(
            file for file in files if os.path.lexists(self.directory / file) and not self._is_intact(file)
        )

    def _name(self, file: Path) -> str:
        return file.relative_to(self.directory).as_posix()

    @contextlib.contextmanager
    def held(self, settings: Settings) -> Iterator[None]:
        """Hold the directory open for the run of ``settings``, on each of its ranks: see :meth:`check_in_place`, whose
        error replaces those that follow from the same cause."""
        with described("opening", self.directory):
            descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._held = descriptor, settings
        try:
            yield
        except (FinetuneError, OSError):
            self.check_in_place()
            raise
        finally:
            self._held = None
            os.close(descriptor)

    def check_in_place(self) -> None:
        """Refuse to write where the directory of this run is not any more.

        Raises:
            UserError: it was moved, replaced, or removed since the run began; says what to type.
        """
        if self._held is None:
            return
        descriptor, settings = self._held
        with described("reading", self.directory), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if os.path.samestat(os.fstat(descriptor), os.stat(self.directory)):
                return
        raise UserError(f"{self.directory} {_where_it_is(descriptor, settings)}")

    # -- writing --------------------------------------------------------------------------------------------------

    def partial(self, name: str) -> Path:
        """Return the folder for files of ``name`` that are not complete."""
        return self.directory / (f"{name}{_PARTIAL}" if name != RESULT else f".export{_PARTIAL}")

    def prepare(self, name: str) -> Path:
        """Make the empty folder for files of ``name``."""
        folder = self.partial(name)
        self.check_in_place()
        with described("writing", folder):
            self.discard(name)
            make_directory(folder)
        return folder

    def discard(self, name: str) -> None:
        """Remove incomplete files, of this process or of one that was killed."""
        shutil.rmtree(self.partial(name), ignore_errors=True)

    def put(self, name: str) -> None:
        """List the files that are complete now, and move them into place, durably.

        Raises:
            UserError: files that the run has not written are in their place; nothing was changed.
        """
        folder = self.partial(name)
        target = self.directory / name
        self.check_in_place()
        others = [] if name == RESULT else self._others(target, is_mine=False)
        names = {target / entry.name for entry in folder.iterdir()}
        if name == RESULT:
            names.update(_named(target, RESULTS))  # what was put there during the run would be loaded with it
        for entry in sorted(names):
            others += self._others(entry, is_mine=True)
        if others:
            raise UserError(
                f"{others[0]} was not written by this run, or changed since, and would be replaced or loaded: move "
                f"{others[0] if name == RESULT else target} elsewhere, then enter the command again, of a run with "
                "--resume."
            )
        with described("writing", target):
            sync_tree(folder)
            before = self.listed(name)
            if changed := self._changed(before):
                print(f"replaced {changed}: changed since this run wrote it", flush=True)
            self._remove_folder(name)
            self._add(folder, target)
            self.write()
            if name == RESULT:
                files = [str(file.relative_to(folder)) for file in _files_of(folder)]
                move(folder, target, sorted(files, key=ENTRY_POINTS.__contains__))
                folder.rmdir()
            else:
                os.replace(folder, target)  # all at once: no part of it is ever seen
            sync(target.parent)

    def remove(self, name: str) -> None:
        """Remove the listed files of a folder, and the folder unless there are others in it."""
        if changed := self._changed(self.listed(name)):
            print(f"kept     {changed}: changed since this run wrote it", flush=True)
        self._remove_folder(name)
        self.write()

    def write(self) -> None:
        """Write the list."""
        content = {"id": self.id, "launch": self.launch, "files": self._files}
        if self.command:
            content["command"] = self.command
        content[_SUM] = _sum_of(content)
        path = self.directory / RUN / FILES
        with described("writing", path):
            make_directory(path.parent)
            replace_file(path, json.dumps(content, indent=1) + "\n")

    def _add(self, source: Path, target: Path) -> None:
        """List what is, or will be, at ``target``, with the states that it has at ``source``."""
        for file in _files_of(source):
            status = file.lstat()
            name = self._name(target / file.relative_to(source))
            self._files[name] = status.st_size, status.st_mtime_ns, _digest(file)

    def _remove_folder(self, name: str) -> None:
        """Remove the listed files of a folder: all at once if it has no others, so that no part of it is loaded."""
        files = self.listed(name)
        target = self.directory / name
        retired = f"{name}{_RETIRED}"
        if name != RESULT and target.is_dir() and not self._others(target, is_mine=False):
            self.discard(retired)
            os.replace(target, self.partial(retired))
        self._remove(files)
        self.discard(retired)

    def _remove(self, files: Iterable[str]) -> None:
        """Take files from the list, and remove them durably if they are intact; first what others load the rest by."""
        files = sorted(files, key=lambda file: Path(file).name not in ENTRY_POINTS)
        for file in files:
            if self._is_intact(file):
                (self.directory / file).unlink()
            del self._files[file]
            remove_empty_folders(self.directory, file)
        sync_folders(self.directory, files)

    # -- from an earlier run to a new one -------------------------------------------------------------------------

    def set_aside(self, settings: Settings, by: str) -> None:
        """Set aside the files of this run, which the run with the id ``by`` replaces."""
        files = [*filter(self._is_intact, self._files), *self._logs()]
        if not files:
            return
        set_aside(self.directory, files, by, settings.stores)

    def begin(self) -> None:
        """Note that the run has a commit, and remove what was set aside."""
        self.has_begun = True
        remove_replaced(self.directory)

    def give_up(self) -> None:
        """Remove the files of a run that has failed before its first commit."""
        self._remove(self._files)
        for name in self._logs():
            (self.directory / name).unlink()
            remove_empty_folders(self.directory, name)

    def remove_incomplete(self) -> None:
        """Remove what a killed process has left incomplete."""
        for path in [
            *self.directory.glob(f"*{_PARTIAL}"),
            *self.directory.glob(f"{CHECKPOINTS}/*{_PARTIAL}"),
        ]:
            if _FOLDER.fullmatch(self._name(path).removesuffix(_PARTIAL)):
                shutil.rmtree(path, ignore_errors=True)
        self.discard(RESULT)
        shutil.rmtree(self.directory / STAGING_FOLDER, ignore_errors=True)
        for name in _LOGS:
            (self.directory / f"{name}{TEMPORARY_SUFFIX}").unlink(missing_ok=True)


def _sum_of(content: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in content.items() if name != _SUM}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()[:32]


def _where_it_is(descriptor: int, settings: Settings) -> str:
    """Return what happened to the output directory that is open as ``descriptor``, and what to do."""
    again = "Then enter the command again." if settings.command == "export" else settings.how_to_continue
    now = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    if os.fstat(descriptor).st_nlink:
        if not (now.is_dir() and os.path.samestat(os.stat(now), os.fstat(descriptor))):
            return (
                "is another directory now than when the run began: something else is mounted there, or its drive no "
                f"longer is. Undo that. {again}"
            )
        back = shlex.join(["mv", str(now), str(settings.output_directory)])
        return f"was moved to {now} during the run. Move it back: {back}. {again}"
    if settings.command == "export":
        return "was removed during the run: enter the command again."
    if settings.ssd:
        return f"was removed during the run, whose store is on other drives. {settings.how_to_continue}"
    return (
        "was removed during the run, with the run's store: nothing of the run is left. To begin again, enter the "
        "command again, without --resume."
    )


def check_outside(directory: Path) -> None:
    """Refuse a directory inside those that another run writes, replaces, and removes."""
    path = directory.expanduser().resolve()
    for outer in path.parents:
        folder = path.relative_to(outer).parts[0]
        signs = [outer / RUN / DESCRIPTION, outer / RUN / FILES, outer / REPLACED / JOURNAL]
        if folder in _FOLDERS and any(sign.exists() for sign in signs):
            raise UserError(
                f"{directory} lies in {outer / folder}, where the run of {outer} writes and removes files: give "
                "another --output."
            )


def _named(folder: Path, patterns: Iterable[str]) -> list[Path]:
    """Return what has one of these names in a folder, also links to nothing, without what is not complete."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    names = [path for path in paths if any(fnmatch(path.name, pattern) for pattern in patterns)]
    return [path for path in names if not path.name.endswith(_PARTIAL)]


def _files_of(entry: Path) -> list[Path]:
    """Return all files in a directory; of a file, nothing but itself."""
    if entry.is_symlink() or not entry.is_dir():
        return [entry] if os.path.lexists(entry) else []
    return [file for path in sorted(entry.iterdir()) for file in _files_of(path)]


def _digest(file: Path) -> str:
    """Return a hash of a file; of a large one, of 4 MiB of it, which nearly any change of weights changes."""
    if file.is_symlink():
        return f"{_link(file)}{content_digest(file)}"
    return content_digest(file) or _NOT_REGULAR


def _link(file: Path) -> str:
    """Return the start of the hash of a link."""
    return f"{_LINK}{os.readlink(file)}: "


def content_digest(file: Path) -> str:
    """Return a hash of what is in a file, or the target of a link; empty if that is no regular file."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        status = file.stat()
        state = status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns
        return _digest_of(file, status.st_size, state) if stat.S_ISREG(status.st_mode) else ""
    return ""


@lru_cache(maxsize=1 << 14)
def _digest_of(file: Path, size: int, state: tuple[int, ...]) -> str:
    """Return the hash of a file of ``size`` bytes, which is computed once for each ``state`` of it."""
    return sampled_digest(file, size)
