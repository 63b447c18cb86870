"""What a command line would do: the arguments of its slow end, which is cut off, as text to compare."""

import dataclasses
import enum
import importlib
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from peft import PeftConfig
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

import cli.inspect.profile
import cli.job.resolve
import cli.plan.cluster
import cli.plan.out_of_core
import cli.train.ranks
from cli.job.job import Job
from cli.main import main
from cli.options.all_options import ClusterSettings, OutputSettings
from common.data import Batches
from common.models.adapters.adapted_model import AdaptedModel
from common.scratch import PREFIX
from fcdp.strategy.mesh import Levels
from fuyou.config import EngineConfig
from fuyou.model.open_model import OpenModel
from fuyou.model.streamed_model import StreamedModel
from fuyou.planner import RunPlan
from fuyou.runtime.device import Device


class Seen(Exception):
    """The slow end was reached; it would be called with these arguments."""


class Observed(NamedTuple):
    status: int
    text: str  # What the command would do; where it is refused, the message

    def number(self, name: str) -> str:
        """Return a number of the plan."""
        return self.text.partition(f"{name}: ")[2].partition(",")[0]


# Fields that repeat what was typed, whether anything reads it or not.
_ECHOES = {
    Job: {"settings", "fixed", "outputs"},
    EngineConfig: {"weights"},  # what is trained, and how it is stored, is read from the model's records
    RunPlan: {"limits"},  # what memory is free differs each time
}
# Options that the loop of a run reads, from groups that hold nothing else.
_OF_LOOP = {field.name for group in (ClusterSettings, OutputSettings) for field in dataclasses.fields(group)}
_OF_LOOP |= {"model", "objective", "batch_size", "cluster", "levels", "resume", "overwrite"}


def as_text(value: Any) -> str:
    """Return everything that decides what is computed, and no address or random name."""
    if isinstance(value, PreTrainedConfig):
        return str(value.to_json_string())
    if isinstance(value, PeftConfig):
        return as_text(value.to_dict())
    if isinstance(value, PreTrainedTokenizerBase):
        return str(value.chat_template)
    if isinstance(value, torch.Tensor):
        return str(value.tolist())
    if isinstance(value, Batches):
        return as_text([type(value).__name__, value.rows, value.description, value.batch(0)])
    if isinstance(value, PreTrainedModel):
        return type(value).__name__ + str(value.config.to_json_string())
    if isinstance(value, AdaptedModel):
        where = "" if value.adapters is None else value.adapters.where
        return as_text([value.base, value.checkpoint, value.trained_parameters, where])
    if isinstance(value, StreamedModel | Device):
        return type(value).__name__
    if isinstance(value, enum.Enum | torch.dtype):
        return str(value)
    if isinstance(value, Path):
        return re.sub(rf"{PREFIX}\w+", "scratch", str(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        echoes = next((names for kind, names in _ECHOES.items() if isinstance(value, kind)), set())
        return as_text(
            {
                field.name: getattr(value, field.name)
                for field in dataclasses.fields(value)
                if field.name not in echoes
            }
        )
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {as_text(each)}" for name, each in value.items()) + "}"
    if isinstance(value, set | frozenset):
        return as_text(sorted(value, key=str))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return "[" + ", ".join(map(as_text, value)) + "]"
    return repr(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__


def _last_ones(words: Sequence[str]) -> list[str]:
    """Return a command line in which each option keeps the values that it is given last."""
    command, *rest = words
    options, name = dict[str, list[str]](), ""
    for word in rest:
        if word.startswith("--"):
            name = word
            options.pop(name, None)
            options[name] = []
        else:
            options.setdefault(name, []).append(word)
    return [command, *(word for name, values in options.items() for word in (name, *values))]


def _job_text(job: Job) -> str:
    settings = job.settings
    read = settings.named(_OF_LOOP - {"output"} | set(settings.traits.options))
    return as_text([job, job.engine.adapters, read, job.output, settings.adapters_in_words])


class Observer:
    """Runs command lines in a folder, and cuts off what is slow."""

    def __init__(self, patch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd, self._said = capfd, list[str]()
        self._seen: dict[tuple[str, ...], Observed] = {}
        self._patch = patch
        self._remember("fuyou.planner.training_job.OpenModel")
        self._remember("cli.job.resolve.AdaptedModel")
        for module in ("cli.job.resolve", "cli.job.machine"):
            patch.setattr(f"{module}.fastest_dtype", lambda device: "fp32" if device == "cpu" else "bf16")
        self._remember("cli.plan.cluster.plan")
        self._remember("cli.plan.out_of_core.search", then=lambda plan: self._say(plan.to_json()))
        patch.setattr("cli.main.stay_offline", lambda download: self._say("downloads", download))
        resolve = cli.job.resolve.resolve
        for module in ("cli.train.engine_trainer", "cli.inspect.evaluate"):
            patch.setattr(f"{module}.resolve", self._noting(resolve))
        patch.setattr("cli.train.engine_trainer.Engine", self._end)
        patch.setattr("cli.train.engine_trainer.profile_once", lambda job: None)
        patch.setattr("cli.main.started_early", ExitStack)
        patch.setattr("cli.launch._Launcher", self._launch)
        patch.setattr("cli.train.ranks.run_on_all_ranks", lambda check: check())
        # Plans and measurements.
        patch.setattr("cli.plan.out_of_core.profile_or_measure", lambda context: self._end(context.workload))
        patch.setattr("cli.inspect.profile.measure", self._end)
        patch.setattr("cli.inspect.check.measure_drive", self._measure_drive)
        patch.setattr("cli.inspect.check.drive_problems", lambda drives, model, needed: self._say_all(needed))
        patch.setattr("fuyou.prove", self._end)
        # Other commands.
        patch.setattr("cli.inspect.evaluate.OpenModel", self._open_model)
        patch.setattr("cli.inspect.evaluate.claim", lambda settings: self._end(settings.output_directory))
        patch.setattr("cli.inspect.chat._tokenizer", self._end)
        patch.setattr("cli.demo.smollm2", lambda: None)
        patch.setattr("cli.demo.teach", self._end)
        # Ranks.
        patch.setattr("cli.train.ranks.broadcast_from_rank0", lambda decide: decide())
        patch.setattr("fcdp.trainer.Trainer", self._end)
        patch.setattr("cli.train.ranks.choose_strategy", self._choose)
        patch.setattr("cli.train.ranks.has_profile", lambda profile, levels: True)
        patch.setattr("cli.train.ranks.cluster_of", lambda *args: args)
        patch.setattr("cli.inspect.profile.meet", lambda settings, rank: (self._topology(settings),))
        patch.setattr("cli.inspect.profile.measure_cluster", self._end)
        patch.setattr("cli.inspect.profile.dtype_of_all", lambda *args: "fp32")

    def observe(self, *words: str) -> Observed:
        """Return what a command line would do."""
        words = tuple(_last_ones(words))
        if words not in self._seen:
            self._seen[words] = self._run(words)
        return self._seen[words]

    def _run(self, words: Sequence[str]) -> Observed:
        self._said.clear()
        for name in ("out", "drive/out", "plan.html", "trace.json"):
            shutil.rmtree(name, ignore_errors=True)
            Path(name).unlink(missing_ok=True)
        self._capfd.readouterr()
        status = main(words)
        out, err = self._capfd.readouterr()
        if status == 2:
            return Observed(status, err.splitlines()[-1])
        ended = self._said and self._said[-1] == "end"
        assert ended or status == 0, err
        files = sorted(name for name in os.listdir() if name in ("plan.html", "trace.json"))
        printed = out if "plan" in words or "--show-data" in words else ""
        return Observed(0, as_text([self._said, printed, files, "Traceback" in err]))

    def _say(self, *what: Any) -> None:
        self._said.extend(map(as_text, what))

    def _say_all(self, *what: Any) -> tuple[Any, ...]:
        self._say(*what)
        return ()

    def _end(self, *args: Any, **more: Any) -> Any:
        self._say(*args, more)
        self._said.append("end")
        raise Seen

    def _noting(self, resolve: Callable[..., Job]) -> Callable[..., Job]:
        def noted(*args: Any) -> Job:
            job = resolve(*args)
            self._said.append(_job_text(job))
            return job

        return noted

    def _remember(self, name: str, then: Callable[[Any], object] = id) -> None:
        """Call a function of the product once for equal arguments."""
        module, _, attribute = name.rpartition(".")
        called = getattr(importlib.import_module(module), attribute)
        results: dict[str, Any] = {}

        def remembered(*args: Any, **more: Any) -> Any:
            key = as_text([*args, more])
            if key not in results:
                results[key] = called(*args, **more)
            then(results[key])
            return results[key]

        self._patch.setattr(name, remembered)

    def _measure_drive(self, directory: Path) -> None:
        self._say(directory)
        raise OSError

    def _open_model(self, *args: Any, **more: Any) -> OpenModel:
        self._say(*args, more)
        return OpenModel(*args, **more)

    def _choose(self, *args: Any) -> SimpleNamespace:
        self._say(*args)
        return SimpleNamespace(name="chosen", step_seconds=0.0, inter_node_bytes=0)

    @staticmethod
    def _topology(settings: Any) -> Any:
        levels = Levels((settings.gpus_per_node or 1, settings.nodes))
        if settings.levels is not None:
            levels = Levels.parse(settings.levels)
        return SimpleNamespace(
            levels=levels, world_size=levels.world_size, ranks_per_node=levels.ranks_per_node, device="cpu"
        )

    def _launch(self, settings: Any, rendezvous: Any, ranks: int, folder: Path) -> Any:
        self._say(rendezvous, ranks, settings.node_timeout, settings.max_restarts)
        settings = dataclasses.replace(settings, gpus_per_node=ranks)
        topology = self._topology(settings)
        if settings.command == "profile":
            cli.inspect.profile.profile_cluster_of_ranks(
                settings, SimpleNamespace(is_rank0=True, enter=lambda where: None)
            )
        job = cli.job.resolve.resolve(settings)
        self._said.append(_job_text(job))
        if job.settings.in_memory:
            cli.train.ranks._open_commits(job, topology, ())
        self._end(topology.levels)
