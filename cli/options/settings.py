"""One run of ``finetune``: what was requested, checked for what can be checked without looking at the machine."""

import contextlib
import dataclasses
import glob
import hashlib
import shlex
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.options.all_options import AllOptions
from cli.options.command import parse_command_line
from cli.options.config_file import effective_config, option_as_toml, options_in_files, options_in_text
from cli.options.objectives import OBJECTIVES, ObjectiveTraits
from cli.options.option import WRITTEN, data_sets, naming, split_weight
from cli.options.run_record import (
    COMMITS,
    CONFIG,
    OPTIONS,
    RUN,
    STORE,
    RunRecord,
    committed_user_state,
    read_description,
    replaced_stores,
    store_places,
)
from common.errors import FinetuneError, UserError
from common.options import declaration_of, option_fields, spelled

if TYPE_CHECKING:
    from fuyou.config import EngineConfig

STORE_PREFIX = "fuyou-"  # Beginning of the names of runs' folders on the SSDs

DEFAULT_PROFILE_MODEL = "gpt3-1.3b"
"""For ``finetune profile`` without --model: a block large enough to show what a device can do, and quick on a CPU."""

RANDOM = "random"  # What ``--data`` calls random tokens

# Options that only some runs read.
_IN_MEMORY = "strategy device_cache_threshold cluster levels"
_OF_NODES = f"{_IN_MEMORY} gpus_per_node rdzv_endpoint node_timeout max_restarts"
_OUT_OF_CORE = (
    "ssd drive_life device_memory host_memory piece_size chunk optimizer io clip_by deterministic frozen_dtype trace "
    "drive ssds network max_model html"
)


@dataclass(frozen=True, kw_only=True)
class Settings(AllOptions):
    """All options of one call, flat: ``settings.lr``."""

    command: str = "train"
    verify: tuple[str, ...] = ()  # Directories of ``finetune verify``
    arguments: tuple[str, ...] = ()  # The command line itself, to say how to continue
    context: click.Context | None = dataclasses.field(default=None, compare=False, repr=False)
    """The command line as it was parsed, with what a file or the continued run adds to it."""
    changes: tuple[str, ...] = ()  # What differs from the options of the continued run, for people
    started_at: float = dataclasses.field(default_factory=time.monotonic, compare=False)
    """When this call began, by a clock that nobody sets."""

    def __post_init__(self) -> None:
        self._check_declarations()
        if self.schedule == "constant":
            self._refuse("min_lr", "has no effect with --schedule constant, which does not fall")
        if self.min_lr > self.highest_lr:
            raise UserError(f"--min-lr {self.min_lr:g} is more than --lr {self.highest_lr:g}.")
        is_plan = self.command == "plan"
        traits = self.traits
        if self.nodes is None and not self.in_memory:
            self._refuse(_OF_NODES, "is for several nodes or ranks: add --nodes N (1 for this machine alone)")
        if self.in_memory and is_plan:
            self._refuse(
                _OUT_OF_CORE, "is for plans out of core, and --cluster, --levels, or --nodes plans in memory"
            )
            self._refuse(
                "gpu host_cache", "is not read in the plan of a cluster, whose description says what it has"
            )
        elif self.in_memory:
            self._refuse(_OUT_OF_CORE, "is for training out of core: name drives, --ssd")
        elif self.nodes is not None or is_plan:
            self._refuse(_IN_MEMORY, "is for training in memory, without --ssd and --drive")
        if self.in_memory and not is_plan and self.strategy not in (None, "auto"):
            self._refuse("cluster", "is for choosing a strategy: give --strategy auto, or none")
        if "beta" not in traits.options:
            self._refuse("beta", "is for --objective dpo")
        if traits.compares:
            self._refuse(
                "lora_dropout", f"has no effect with --objective {self.objective}, which drops nothing"
            )
        if traits.outputs and self.command == "train" and not self.data:
            raise UserError(f"--objective {self.objective} {traits.learns}: give --data with {traits.data}.")
        if traits.outputs and self.in_memory:
            raise UserError(
                f"--objective {self.objective} does not go with --nodes in memory: give each node drives, --ssd, or "
                "write the loop with fuyou.Engine.tokens, which several ranks can call."
            )

    def _check_declarations(self) -> None:
        """Reject options that exclude each other, and those that do nothing without another one."""
        fields = option_fields(Settings)
        given = {field.name for field in fields if getattr(self, field.name) != field.default}
        for field in (field for field in fields if field.name in given):
            declared = declaration_of(field)
            shown = declared.flags.split("/")[1] if declared.flags else spelled(field.name)
            other = next((name for name in declared.excludes.split() if name in given), None)
            if other is not None:
                raise UserError(f"{shown} and {spelled(other)} exclude each other: give one of them.")
            if declared.needs and given.isdisjoint(declared.needs.split()):
                raise UserError(
                    f"{shown} does nothing without {' or '.join(map(spelled, declared.needs.split()))}: add that."
                )

    def _refuse(self, names: str, why: str) -> None:
        for field in option_fields(Settings):
            if field.name in names.split() and getattr(self, field.name) != field.default:
                raise UserError(f"{spelled(field.name)} {why}.")

    @property
    def plans_cluster(self) -> bool:
        """Whether it is a plan for a cluster that trains in memory."""
        return bool(self.cluster or self.levels or (self.nodes and not (self.drive or self.ssd)))

    @property
    def traits(self) -> ObjectiveTraits:
        return OBJECTIVES[self.objective]

    @classmethod
    def of_options(cls, options: Mapping[str, Any], arguments: tuple[str, ...], **more: Any) -> "Settings":
        """Return what a parsed command line asks for; patterns are expanded. ``more`` fields are no options."""
        given = dict(options)
        for field in option_fields(cls):
            if declaration_of(field).patterns and field.name in options:
                # What has a weight is one data set, however many files there are in it: it is expanded when opened.
                given[field.name] = tuple(
                    path
                    for word in options[field.name]
                    for path in (
                        [word]
                        if field.name == "data" and split_weight(word)[1] is not None
                        else expand_pattern(spelled(field.name), word)
                    )
                )
        if given.get("data") == (RANDOM,) and not Path(RANDOM).exists():
            given["data"] = ()
        given["model"] = options.get("model") or (
            DEFAULT_PROFILE_MODEL if more.get("command") == "profile" else ""
        )
        return cls(**given, arguments=arguments, **more)

    def named(self, names: Collection[str]) -> dict[str, Any]:
        """Return those of these names that are options, as the engine and the trainer take them, which name some
        others."""
        values = {field.name: getattr(self, field.name) for field in option_fields(Settings)} | {
            "lr": self.highest_lr,
            "betas": (self.beta1, self.beta2),
            "commit_every": self.commit_interval,
            "max_grad_norm": self.max_grad_norm or None,
        }
        return {name: value for name, value in values.items() if name in names}

    @cached_property
    def engine(self) -> "EngineConfig":
        """The options of the engine, validated. It has no drives yet, and so no ``drive_life`` either."""
        from fuyou.config import EngineConfig
        from fuyou.option_groups import OPTION_NAMES

        later = {"ssd", "leave_ssd", "resume", "overwrite", "drive_life"}
        return EngineConfig.of(
            **self.named(OPTION_NAMES - later),
            ssd=".",
            adapters=self._adapters(),
            freeze_vision_tower=self.train_vision != "all",
            freeze_multi_modal_projector=self.train_vision is None,
            token_outputs=self.traits.outputs,
            automatic=True,
        )

    def _adapters(self) -> Any:
        if self.adapter is not None:
            return self.adapter.expanduser()
        from common.models.adapters.options import AdapterOptions, load_peft_config

        if self.peft_config is not None:
            return load_peft_config(self.peft_config)
        if self.lora_rank is None:
            return None
        return AdapterOptions(self.lora_rank, self.lora_alpha, self.lora_dropout, self.lora_targets)

    @property
    def highest_lr(self) -> float:
        """The highest learning rate: as it is requested, else what usually works."""
        if self.lr is not None:
            return self.lr
        return 2e-4 if self.trains_adapters and not self.traits.needs_reference else 1e-5

    @property
    def trains_adapters(self) -> bool:
        """Whether the weights are frozen and adapters are trained."""
        return not (self.lora_rank is None and self.peft_config is None and self.adapter is None)

    @property
    def adapters_in_words(self) -> str:
        """What adapters are trained; empty if none are."""
        if self.adapter is not None:
            return f"those of {self.adapter}, trained further"
        if self.lora_rank is not None:
            return f"LoRA of rank {self.lora_rank}"
        return "" if self.peft_config is None else str(self.peft_config)

    @property
    def in_memory(self) -> bool:
        """Whether several ranks train in memory."""
        return self.plans_cluster if self.command == "plan" else self.nodes is not None and not self.ssd

    @property
    def commit_interval(self) -> int:
        """Number of steps from one commit to the next. In memory, each writes 12 bytes per parameter."""
        return self.commit_every or (100 if self.in_memory else 1)

    @property
    def output_directory(self) -> Path:
        return output_directory(self.output, self.model)

    @property
    def data_sets(self) -> list[tuple[tuple[str, ...], float | None]]:
        """Data sets of ``--data``, each with its files and its weight; patterns are expanded."""
        with naming("--data"):
            return [
                (tuple(path for word in words for path in expand_pattern("--data", word)), weight)
                for words, weight in data_sets(self.data)
            ]

    @property
    def column_of(self) -> dict[str, str]:
        return dict(pair.split("=", 1) for pair in self.columns)

    @property
    def drives(self) -> list[Path]:
        return [Path(word).expanduser() for word in self.ssd]

    @property
    def drives_to_leave(self) -> list[Path]:
        return [Path(word).expanduser() for word in self.leave_ssd]

    @property
    def stores(self) -> list[Path]:
        """The run's folder in each directory where it may be."""
        return [
            path / self.store_name
            for path in [*self.drives, *self.drives_to_leave] or [self.output_directory]
        ]

    @property
    def store_name(self) -> str:
        if self.in_memory:
            return COMMITS
        if not self.ssd:
            return STORE
        return store_name(self.output_directory, bool(self.resume))

    def configuration(self, dtype: str) -> str:
        """Return all options of the run as TOML, with the dtype that was chosen, for another machine."""
        context = self.context or parse_command_line(self.arguments)
        context.meta.setdefault(WRITTEN, {})["dtype"] = dtype
        return effective_config(context, of_run=True)

    @property
    def how_to_continue(self) -> str:
        """The command that continues this run, as a sentence."""
        if self.export:
            return "Enter the command again."
        words = [
            word
            for before, word in pairwise(("", *self.arguments))
            if word not in ("--overwrite", "--no-overwrite")
            and not word.startswith("--resume")
            and (before, word) not in (("--resume", "auto"), ("--resume", "no"))
        ]
        return f"To continue: {shlex.join(['finetune', *words, '--resume'])}"


def store_name(output: Path, resume: bool) -> str:
    """Return the name of the folder that the run of an output directory has on each drive.

    The same drives serve many runs: each is named after its output directory, as that was called when it began.
    """
    name = read_description(output).get("store") if resume else None
    if isinstance(name, str) and name.startswith(STORE_PREFIX) and Path(name).name == name:
        return name
    return f"{STORE_PREFIX}{output.name}-{hashlib.sha256(str(output).encode()).hexdigest()[:6]}"


def output_directory(output: Path | None, model: str) -> Path:
    """Return the absolute path of the output directory of a run of ``--model`` with ``--output``."""
    if output is not None:
        return output.expanduser().absolute()
    return (Path("finetune-output") / Path(model).expanduser().absolute().name).absolute()


def expand_pattern(option: str, name: str) -> list[str]:
    """Return what a quoted pattern stands for, sorted; a name that exists, or has no pattern signs, is itself."""
    path = str(Path(name).expanduser())
    if Path(path).exists() or not glob.has_magic(path):
        return [name]
    paths = sorted(glob.glob(path, recursive=True))
    if not paths:
        raise UserError(f"{option} {name}: nothing matches this pattern.")
    from common.data.files import complete

    with naming(option):
        complete([Path(path) for path in paths])
    return paths


def settings_of(command: str, context: click.Context, arguments: tuple[str, ...]) -> Settings:
    """Return what a command line asks for; of a continued run, with the run's own options where they are left out."""
    changes: tuple[str, ...] = ()
    if command == "train" and (context.params["resume"]):
        context, changes = with_own_options(context, arguments)
    return Settings.of_options(context.params, arguments, command=command, context=context, changes=changes)


def with_own_options(
    context: click.Context, arguments: Iterable[str]
) -> tuple[click.Context, tuple[str, ...]]:
    """Return a command line whose left out options have the run's own values, and what differs, for people.

    They are those of the newest commit. Runs of earlier versions have them in a file alone.
    """
    output = output_directory(context.params["output"], context.params["model"] or "")
    stored = _committed_options(context, output)
    if stored is None:
        file = output / RUN / CONFIG
        with contextlib.suppress(OSError):
            stored = parse_command_line(["--config", str(file)]) if file.stat().st_size else None
        if stored is None:
            return context, (f"{file} is missing: options that are left out have their defaults",)
    # Runs of versions whose default was another one do not say what they adapt.
    defaults = {"lora_targets": ("all-linear",), **(stored.default_map or {})}
    continued = parse_command_line(arguments, defaults)
    return continued, tuple(_changes(stored, continued))


def _committed_options(context: click.Context, output: Path) -> click.Context | None:
    drives = [Path(word).expanduser() for word in (*context.params["ssd"], *context.params["leave_ssd"])]
    folders = [drive / store_name(output, resume=True) for drive in drives]
    inside = [output / STORE, output / COMMITS]
    record = RunRecord.read(output)
    if record is not None and record.places:  # other stores are another run's
        stores = {place.store for place in record.places}
        # First what the run opens: in a copy of an output, the description names the directories of the original.
        folders += [folder for folder in inside if _holds_any(folder, stores)]
        folders += [Path(place.path) for place in record.places if place.is_there()]
    else:
        folders += inside
    text = committed_user_state(folders).get(OPTIONS)
    if not isinstance(text, str):
        return None
    return parse_command_line([], options_in_text(f"the options of the run in {output}", text, context))


def _holds_any(folder: Path, stores: Collection[str]) -> bool:
    """Return whether a folder has a directory of one of these stores, or of a successor."""
    with contextlib.suppress(FinetuneError, OSError):
        names = {place.store for place in store_places([folder])} | replaced_stores([folder])
        return not names.isdisjoint(stores)
    return False


def _changes(stored: click.Context, now: click.Context) -> Iterable[str]:
    for option in options_in_files(now):
        before = stored.params[option.name or ""]
        after = now.params[option.name or ""]
        # Paths are equal where they are when absolute. Options of a call have no value in a run's own configuration.
        is_same = option_as_toml(stored, option, of_run=True) == option_as_toml(now, option, of_run=True)
        takes_own = option.name == "dtype" and after == "auto"
        if not (before == after or is_same or takes_own):
            yield f"{option.typed(after)} instead of {option.typed(before)}"
