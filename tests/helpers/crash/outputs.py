"""Commands whose every change of a file outside the store is a point to crash at, and what must hold afterwards.

A command is recorded once, undisturbed. From that record come the files that a kill or a power cut before any of its
calls may leave. At each point, every file with a final name is whole; and after the command was called again, all files
are those of the undisturbed one.
"""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.helpers.crash import syscalls
from tests.helpers.crash.journal import ENDINGS, Change, File, Journal, State, write_state
from tests.helpers.processes import forked

HAS_GGUF = importlib.util.find_spec("gguf") is not None

_MODEL = ("--model", "{inputs}/model", "--seq-len", "16", "--batch-size", "2", "--lr", "1e-2", "--gpu", "cpu")
_TRAINING = (*_MODEL, "--data", "{inputs}/data.jsonl", "--dtype", "fp32", "--output", "out")
_EVALUATED = ("--eval-split", "10%", "--eval-every", "1", "--save-every", "1", "--keep", "1", "--steps", "3")
_ADAPTERS = ("--lora-rank", "2", "--chat-template", "chatml")
_RANKS = ("--nodes", "1", "--gpus-per-node", "2")
_CACHE = "cache/"


@dataclass(frozen=True)
class Command:
    """A command that is crashed, in an empty directory or where others have run before."""

    words: tuple[str, ...]
    before: tuple[tuple[str, ...], ...] = ()
    only: str = ""
    """Crash only at calls that change files whose paths begin so."""

    @property
    def trains(self) -> bool:
        return self.words[0] != "export"


COMMANDS = {
    "weights": Command((*_TRAINING, *_EVALUATED)),
    "adapters": Command((*_TRAINING, *_EVALUATED, *_ADAPTERS)),
    "classifier": Command((*_TRAINING, "--objective", "classify", "--steps", "2")),
    "weights over adapters": Command(
        (*_TRAINING, *_EVALUATED, "--overwrite"), ((*_TRAINING, *_EVALUATED, *_ADAPTERS),)
    ),
    "adapters over weights": Command(
        (*_TRAINING, *_EVALUATED, *_ADAPTERS, "--overwrite"), ((*_TRAINING, *_EVALUATED),)
    ),
    "export": Command(
        ("export", "--model", "{inputs}/model", "--adapter", "adapters", "--output", "out"),
        ((*_TRAINING, *_ADAPTERS, "--steps", "1", "--output", "adapters"),),
    ),
    "ranks": Command((*_TRAINING, *_EVALUATED, *_RANKS, "--strategy", "fcdp")),
    "ranks that measure": Command((*_TRAINING, "--steps", "1", *_RANKS), only="out/cluster.json"),
    "first use": Command((*_TRAINING, "--steps", "1"), only=_CACHE),
}  # fmt: skip
if HAS_GGUF:  # with adapters for llama.cpp among the files
    COMMANDS["adapters on a GGUF file"] = Command(
        (*_TRAINING, *_EVALUATED, *_ADAPTERS, "--model", "{inputs}/model.gguf")
    )

# What a killed command may leave half done: the next one removes it.
_TEMPORARY = re.compile(r"(.*\.tmp|\.tmp.*|tmp.*|.*[.-](partial|incomplete)|incomplete|discarded|\.replaced)")
# Where records are, which are written in place: what crashes leave there is tried by tests/crash/test_points.py.
_STORE = re.compile(r"(adapters|out)/store(\.new)?/.*")
_LOGS = (".jsonl",)  # which grow line by line, and may end in a part of one
# With times
_RUN_FILES = ("run/run.json", "run/index.html", "run/metrics.jsonl", "run/files.json", "cluster.json")


def inputs(folder: Path) -> None:
    """Make model and data in ``folder``, which is there."""
    from tests.helpers.models.small_checkpoints import small_checkpoint

    small_checkpoint(folder / "model")
    if HAS_GGUF:
        from transformers import LlamaConfig

        from tests.helpers.models.gguf_files import FIELDS, LLAMA, write_gguf

        write_gguf(folder / "model.gguf", LlamaConfig(**LLAMA), FIELDS)
    rows = [
        {"text": f"Row {row} has the value {row * 7 % 100}.", "label": "ab"[row % 2]} for row in range(40)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


class Recorded:
    """A command that was recorded, and the crashes of it.

    Args:
        command: to record.
        folder: an empty one, for all that is needed.
    """

    def __init__(self, command: Command, folder: Path):
        self._command, self._folder = command, folder
        (folder / "inputs").mkdir()
        inputs(folder / "inputs")
        self._root = folder / "run"
        self._root.mkdir()
        for words in command.before:
            status, text = self._run(self._root, words)
            assert status == 0, text
        self.journal = Journal(self._root)
        status, text = syscalls.record(
            ["-m", "cli.main", *self._words(command.words)], self.journal.note, cwd=self._root,
            env=self._environment(self._root),
        )  # fmt: skip
        assert status == 0, text
        self.journal.check_complete()
        self._covered = self.journal.covered()
        self._files = self._files_in(self._root)
        self._versions = self._all_versions()
        self._resumed = set[str]()

    def _environment(self, root: Path) -> dict[str, str]:
        cache = root if self._command.only == _CACHE else self._folder  # else it is filled by what runs first
        return {**os.environ, "FINETUNE_CACHE": str(cache / "cache"), "CUDA_VISIBLE_DEVICES": ""}

    def _words(self, words: Sequence[str]) -> list[str]:
        return [word.format(inputs=self._folder / "inputs") for word in words]

    def _run(self, root: Path, words: Sequence[str]) -> tuple[int, str]:
        with tempfile.TemporaryFile("w+") as output:
            process = forked.Popen(
                [sys.executable, "-m", "cli.main", *self._words(words)], cwd=root, env=self._environment(root),
                stdin=forked.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
            with process:
                status = process.wait(300)
            output.seek(0)
            return status, output.read()

    # -- points -------------------------------------------------------------------------------------------------------

    @cached_property
    def points(self) -> list[int]:
        """Numbers of the changes outside the store, and of the end: a crash comes right before."""
        changes = self.journal.changes
        only = self._command.only
        outside = [number for number, change in enumerate(changes) if not _is_in_store(change)]
        return [*(number for number in outside if str(changes[number].path).startswith(only)), len(changes)]

    def kind(self, point: int) -> tuple[str, str]:
        """Return what happens at a point: call and file, without numbers and random names."""
        if point == len(self.journal.changes):
            return "end", ""
        change = self.journal.changes[point]
        return change.kind, re.sub(r"\d+", "N", re.sub(r"\.?tmp\w{6,}", "tmp", str(change.path)))

    def sample(self, part: int, parts: int) -> Iterator[tuple[int, str]]:
        """Return points and endings: each kind of point once, spread over several days."""
        kinds: dict[tuple[str, str], list[int]] = {}
        for point in self.points:
            kinds.setdefault(self.kind(point), []).append(point)
        for number, points in enumerate(kinds.values()):
            if number % parts == part % len(kinds):
                # Where there are fewer kinds than parts: one of them each day
                yield points[(part + number) % len(points)], ENDINGS[(part + number // parts) % len(ENDINGS)]

    # -- what must hold -----------------------------------------------------------------------------------------------

    def faults(self, point: int, ending: str) -> list[str]:
        """Return what a crash leaves that is neither old nor new, one sentence for each."""
        state = self.journal.state(point, ending, self._covered, _is_of_records)
        visible = {path: file for path, file in state.items() if _is_final(path)}
        parts = [
            f"{path}: {len(file.data)} bytes, which are {'a part' if file.data else 'none'} of it"
            for path, file in visible.items()
            if file.data is not None and not self._is_whole(path, file)
        ]
        return [*parts, *self._half_folders(point, visible), *self._mixtures(visible), *self._lost(state)]

    def resume(self, root: Path, point: int, ending: str) -> bool:
        """Call the command again after a crash, in ``root``, which is made.

        Returns:
            Whether that was tried: not if an earlier crash has left the same.

        Raises:
            AssertionError: it fails, or some file is not that of the undisturbed command.
        """
        state = self.journal.state(point, ending, self._covered)
        if (content := _digest(state)) in self._resumed:
            return False
        root.mkdir()
        write_state(state, root)
        words = self._command.words
        if self._command.trains and ("--overwrite" not in words or self._has_new_commit(state)):
            words = (*(word for word in words if word != "--overwrite"), "--resume", "auto")
        elif not self._command.trains and (root / "out/config.json").exists():
            words = (*words, "--overwrite")
        status, text = self._run(root, words)
        assert status == 0, f"status {status}: {text[-600:]}"
        files = self._files_in(root)
        differ = sorted(
            name for name in files.keys() | self._files.keys() if files.get(name) != self._files.get(name)
        )
        left = [name for name in differ if name not in self._files]
        assert not differ, f"{differ[0]} {'is left over' if left else 'differs'} ({len(differ)} files do)"
        shutil.rmtree(root)
        self._resumed.add(content)
        return True

    def _all_versions(self) -> dict[int, list[bytes]]:
        """Return what each file was whenever it was complete, by its number: at the end, and before it was cut."""
        versions: dict[int, list[bytes]] = {}
        for tree, change in self.journal.replayed():
            if change is None:
                for node, data in tree.data.items():
                    versions.setdefault(node, []).append(bytes(data))
            elif change.kind == "truncate" and change.offset < len(tree.data[change.node]):
                versions.setdefault(change.node, []).append(bytes(tree.data[change.node]))
        return versions

    def _is_whole(self, path: Path, file: File) -> bool:
        assert file.data is not None
        versions = self._versions[file.node]
        if path.suffix in _LOGS:
            return any(version.startswith(file.data) for version in versions)
        return file.data in versions

    @cached_property
    def _folders(self) -> dict[int, tuple[int, frozenset[Path]]]:
        """What was in each folder when it got its final name, and when that was."""
        folders: dict[int, tuple[int, frozenset[Path]]] = {}
        for number, (tree, change) in enumerate(self.journal.replayed()):
            if (
                change is not None
                and change.kind == "rename"
                and change.node in tree.names
                and _is_final(change.path)
            ):
                folders[change.node] = number, frozenset(path for path, _ in tree.walk(change.node))
        return folders

    def _half_folders(self, point: int, visible: State) -> Iterator[str]:
        for folder, file in visible.items():
            number, content = self._folders.get(file.node, (point, frozenset()))
            if number < point:
                missing = sorted(str(path) for path in content if folder / path not in visible)
                if missing:
                    yield f"{folder}: without {', '.join(missing)}"

    def _mixtures(self, visible: State) -> Iterator[str]:
        """Loaders take all files of a folder for those of one model."""
        old = self.journal.old
        for folder in {
            path.parent for path in visible if path.name in ("config.json", "adapter_config.json")
        }:
            files = {path.name: file.node in old for path, file in visible.items() if path.parent == folder}
            files = {
                name: is_old
                for name, is_old in files.items()
                if re.search(r"(safetensors|json|jinja)$", name)
            }
            if len(set(files.values())) > 1:
                before = sorted(name for name, is_old in files.items() if is_old)
                yield f"{folder}: {', '.join(before)} of the run before, all else of the new one"

    def _lost(self, state: State) -> Iterator[str]:
        """Until the new run has a commit, nothing of the old one is gone."""
        if "--overwrite" in self._command.words and not self._has_new_commit(state):
            there = {file.node for file in state.values()}
            for path, node in self.journal.first.walk():
                if node not in there and node in self.journal.first.data and not _STORE.fullmatch(str(path)):
                    yield f"{path}: removed before the new run has a commit"

    def _has_new_commit(self, state: State) -> bool:
        names = ("manifest.json", "commit.json")
        return any(path.name in names and file.node not in self.journal.old for path, file in state.items())

    def _files_in(self, root: Path) -> dict[str, Any]:
        """Return the content of all files outside the store, as far as it is the same each time."""
        files: dict[str, Any] = {}
        for path in sorted(root.rglob("*")):
            name = str(path.relative_to(root))
            if re.match(r"(out|adapters)/(store|commits)/|.*\.lock$", name) or not path.is_file():
                continue
            if name.startswith("cache/"):  # what is damaged is made again
                files[name] = path.stat().st_size
            elif name.removeprefix("out/") in _RUN_FILES:
                files[name] = _without_times(path)
            elif path.suffix == ".safetensors":  # whose metadata come in any order
                data = path.read_bytes()
                end = 8 + int.from_bytes(data[:8], "little")
                files[name] = json.loads(data[8:end]), data[end:]
            else:
                files[name] = path.read_bytes().replace(bytes(root), bytes(self._root))
        return files


def _digest(state: State) -> str:
    digest = hashlib.blake2b()
    for path, file in state.items():
        digest.update(repr((str(path), file.is_link, None if file.data is None else len(file.data))).encode())
        digest.update(file.data or b"")
    return digest.hexdigest()


def _is_in_store(change: Change) -> bool:
    return _STORE.fullmatch(str(change.path)) is not None


def _is_of_records(change: Change) -> bool:
    return _is_in_store(change) and "manifest.json" not in change.path.name


def _is_final(path: Path) -> bool:
    """Whether a file is to be whole always. Those of the cache are verified before they are used."""
    if path.parts[0] == "cache":
        return False
    is_temporary = any(_TEMPORARY.fullmatch(part) for part in path.parts)
    return not is_temporary and not any(_STORE.fullmatch(f"{path}{rest}") for rest in ("", "/"))


def _without_times(path: Path) -> Any:
    text = path.read_text()
    if path.name == "metrics.jsonl":
        lines = [json.loads(line) for line in text.splitlines()]
        return [{name: value for name, value in line.items() if _is_same_each_time(name)} for line in lines]
    if path.name == "files.json":
        return sorted(json.loads(text)["files"])
    if path.suffix == ".json":
        return sorted(json.loads(text).keys())
    return text.rstrip().endswith("</html>")


def _is_same_each_time(name: str) -> bool:
    return name == "step" or name.split("/")[-1].startswith(("loss", "grad_norm", "lr", "perplexity"))
