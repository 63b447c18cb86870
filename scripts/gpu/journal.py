"""Results on disk as soon as they are there: one JSON file, and the same as Markdown."""

import json
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from common.files import replace_file
from gpu.report import render

ROOT = Path(__file__).resolve().parents[2]
DATA_PREFIX = "gpu-check-data-"
"""Everything that sections write to the drive has a name that begins with this, and is removed again."""
STORE_BYTES = 24.1
"""Bytes on the drive for each parameter of a model that is trained in full: two slots, and gradients."""
_PRINTED = ("name", "verdict", "batch", "seconds", "tokens_per_second", "planned", "ratio", "why")


class Skip(Exception):
    """The section has nothing to do here; says why."""


@dataclass(frozen=True)
class Settings:
    """The command's options; passed to every section's process as JSON."""

    output: str  # Directory that results.json, results.md and traces go to
    ssd: str  # Directory on the drive to measure; stores are made in separate folders in it, and removed
    device: str  # ``cpu`` or ``cuda:N``
    quick: bool  # Tiny models and sizes: whether everything runs, not how fast
    device_memory: str | None
    host_memory: str | None
    presets: tuple[str, ...]
    batches: tuple[int, ...]  # Sequences in a batch
    seq_len: int
    command: str = ""
    deadline: float = 0.0  # When this section has to be done, on :func:`time.time`'s clock

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Settings":
        fields = json.loads(text)
        return Settings(
            **{**fields, "presets": tuple(fields["presets"]), "batches": tuple(fields["batches"])}
        )

    def until(self, deadline: float) -> "Settings":
        return replace(self, deadline=deadline)


class Journal:
    """results.json and results.md. One process at a time writes: the section's while it runs, else the command's."""

    def __init__(self, output: Path):
        self._json, self._markdown = output / "results.json", output / "results.md"

    def read(self) -> dict[str, Any]:
        """Everything written so far."""
        if not self._json.exists():
            return {"sections": {}}
        result: dict[str, Any] = json.loads(self._json.read_text())
        return result

    def write(self, results: dict[str, Any]) -> None:
        """Replace both files; a reader, or a kill, never sees half of one."""
        replace_file(self._json, json.dumps(results, indent=1, default=str))
        try:
            replace_file(self._markdown, render(results))
        except Exception:  # a table that cannot be drawn must not cost the figures
            replace_file(
                self._markdown, f"The report could not be drawn:\n\n```\n{traceback.format_exc()}```\n"
            )

    def update(self, section: str, **values: Any) -> None:
        """Set fields of one section's entry."""
        results = self.read()
        results["sections"].setdefault(section, {"data": {}}).update(values)
        self.write(results)


class Check:
    """What a section works with: settings, the time it has left, and where its figures go."""

    def __init__(self, name: str, settings: Settings):
        self.name, self.settings = name, settings
        self.output, self.ssd = Path(settings.output), Path(settings.ssd)
        self._journal = Journal(self.output)
        self.data: dict[str, Any] = {}

    @property
    def cuda(self) -> bool:
        return self.settings.device.startswith("cuda")

    def note(self, **values: Any) -> None:
        """Keep figures."""
        self.data.update(values)
        self._save()

    def add(self, table: str, **row: Any) -> None:
        """Keep one row of a table, and print it; of several rows of one name the last counts."""
        rows = self.data.setdefault(table, [])
        rows[:] = [other for other in rows if "name" not in row or other.get("name") != row["name"]]
        rows.append(row)
        self._save()
        print(
            f"    {self.name}: " + ", ".join(str(row[name]) for name in _PRINTED if name in row), flush=True
        )

    def attempt(self, name: str, work: Callable[[], Any]) -> Any:
        """Keep what ``work`` returns; if it fails, keep why and return None."""
        try:
            value = work()
        except Skip as skip:
            self.note(**{name: f"skipped: {skip}"})
        except Exception as error:
            print(traceback.format_exc(), flush=True)
            self.note(**{name: f"failed: {describe(error)}"})
        else:
            self.note(**{name: value})
            return value
        return None

    def left(self) -> float:
        """Seconds until this section has to be done."""
        return self.settings.deadline - time.time()

    def earlier(self, section: str) -> dict[str, Any]:
        """The figures of a section that has run before; empty if it has not."""
        data: dict[str, Any] = self._journal.read()["sections"].get(section, {}).get("data", {})
        return data

    def directory(self, name: str) -> Path:
        """An empty directory on the drive."""
        path = self.ssd / f"{DATA_PREFIX}{name}"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def command(self, name: str, words: Sequence[Any], part: float = 1.0, **options: Any) -> str:
        """Run ``finetune`` with ``words`` for this part of the time at most; keep and return what it prints, also if it
        fails or takes too long."""
        log = self.output / f"{self.name.replace(':', '-')}-{name}.log"
        command = [sys.executable, *(options.pop("start", ("-m", "cli.main"))), *map(str, words)]
        try:
            with log.open("w") as file:
                done = subprocess.run(
                    command,
                    stdout=file,
                    stderr=file,
                    cwd=ROOT,
                    timeout=max(10.0, part * self.left()),
                    check=False,
                    **options,
                )
        finally:
            text = log.read_text()
            self.note(**{name: text})
        if done.returncode:
            raise RuntimeError(f"exit status {done.returncode}: {text[-300:]}")
        return text

    def _save(self) -> None:
        self._journal.update(self.name, data=self.data)


def describe(error: BaseException) -> str:
    """One line: the error's class and the beginning of its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
