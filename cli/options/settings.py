"""One run of ``finetune``: what was requested, checked for what can be checked without looking at the machine."""

import contextlib
import dataclasses
import glob
import hashlib
import json
import shlex
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.options.all_options import AllOptions
from cli.options.command import parse_command_line
from cli.options.config_file import effective_config, option_as_toml, options_in_files
from cli.options.objectives import OBJECTIVES, SPECIFIC, ObjectiveTraits, readers
from cli.options.option import WRITTEN, data_sets, naming, split_weight
from common.errors import UserError
from common.options import declaration_of, option_fields, spelled

if TYPE_CHECKING:
    from fuyou.config import EngineConfig

COMMITS = "commits"  # Folder inside the output directory where a run of several ranks has its commits

RUN, DESCRIPTION, CONFIG = "run", "run.json", "config.toml"
"""Folder inside the output directory that describes the run, and files in it: one names the run's store, one has all
options."""

STORE_PREFIX = "fuyou-"  # Beginning of the names of runs' folders on the SSDs

DEFAULT_PROFILE_MODEL = "gpt3-1.3b"
"""For ``finetune profile`` without --model: a block large enough to show what a device can do, and quick on a CPU."""

RANDOM = "random"  # What ``--data`` calls random tokens

Rule = tuple[bool, str, str]  # Whether options may be given, their names, and why not

_ALONE = "is for several nodes or ranks: add --nodes N (1 for this machine alone)"

# Options that only some runs have.
_IN_MEMORY = "strategy device_cache_threshold cluster"
_OF_NODES = f"{_IN_MEMORY} gpus_per_node rdzv_endpoint node_timeout max_restarts"
_OUT_OF_CORE = "drive_life device_memory host_memory piece_size chunk optimizer io clip_by deterministic frozen_dtype"
_OF_CLUSTER = (
    "model download seq_len batch_size micro_batch nodes gpus_per_node levels lora_rank lora_targets peft_config "
    "adapter json config debug"
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
    started_at: float = dataclasses.field(default_factory=time.time, compare=False)
    """When this call began, in seconds since 1970."""

    def __post_init__(self) -> None:
        self._check_pairs()
        self._apply(self._rules())
        self._check_objective()
        if self.command != "plan":  # which takes any number of devices that are not here
            self._apply(self._rules_of_nodes())

    def check_plan(self) -> None:
        """Reject options that this kind of plan does not read."""
        if self.plans_cluster and self.ssd:
            raise UserError(
                "--ssd is for a plan of this machine. For several nodes with SSDs, name their hardware: --gpu NAME "
                "--drive NAME --ssds N --network 25Gbit/s; for training in memory, leave --ssd out."
            )
        self._apply(self._rules_of_plans())

    def _apply(self, rules: Iterable[Rule]) -> None:
        for allowed, names, why in rules:
            for field in option_fields(Settings):
                if not allowed and field.name in names.split() and getattr(self, field.name) != field.default:
                    shown = "--drop-long" if field.name == "truncate" else spelled(field.name)
                    raise UserError(f"{shown} {why}.")

    def _check_pairs(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise UserError(f"--steps {self.steps} and --epochs {self.epochs:g} exclude each other: give one of them.")
        if self.eval_split is not None and self.eval_data:
            raise UserError("--eval-split and --eval-data both say what to evaluate with: give one of them.")
        if self.min_lr > self.highest_lr:
            raise UserError(f"--min-lr {self.min_lr:g} is more than --lr {self.highest_lr:g}.")
        if self.resume and self.overwrite:
            raise UserError("--resume continues the run that is there and --overwrite replaces it: give one of them.")
        says = [name for name in ("lora_rank", "peft_config", "adapter") if getattr(self, name) is not None]
        if len(says) > 1:
            both = " and ".join(map(spelled, says[:2]))
            raise UserError(f"{both} both say what the adapters are: give one of them.")

    def _rules(self) -> Iterator[Rule]:
        data, held_out = bool(self.data), bool(self.eval_data) or self.eval_split is not None
        yield data, "epochs", "counts passes over data, and there is none: give --data, or --steps instead"
        none = "counts evaluations, and there is no data for them: add --eval-data, or --eval-split"
        yield held_out, "eval_every patience", none
        yield self.eval_every is not None, "patience", "counts evaluations: add --eval-every N"
        yield data, "eval_split columns max_records show_data", "is about the records of --data: add that"
        longer = "is about records that are longer than --seq-len: add --data"
        yield data or bool(self.eval_data), "truncate", longer
        yield self.resume, "export", "writes the result of an existing run: add --resume"
        yield self.save_every is not None, "keep", "counts checkpoints of --save-every: add that"
        yield self.resume and bool(self.ssd), "leave_ssd", "needs --resume, and --ssd for the drives that stay"
        lora, add = "lora_alpha lora_dropout lora_targets", "add --lora-rank, --peft-config or --adapter"
        yield self.adapter is None, lora, f"is what the adapters of --adapter {self.adapter} have already: leave it out"
        how = "is about LoRA adapters: add --lora-rank, or put it into --peft-config's file"
        yield self.lora_rank is not None, lora, how
        frozen = f"{self.frozen_dtype} is about weights that are frozen: {add}"
        yield self.trains_adapters, "frozen_dtype", frozen

    def _rules_of_nodes(self) -> Iterator[Rule]:
        if self.nodes is None:
            yield False, f"{_OF_NODES} levels", _ALONE
            return
        choosing = self.strategy in (None, "auto")
        yield choosing, "cluster", "is for choosing a strategy: give --strategy auto, or none"
        yield not self.ssd, _IN_MEMORY, "is for training in memory, without --ssd: leave one of them out"
        yield bool(self.ssd), _OUT_OF_CORE, "does not go with --nodes, which trains in memory unless --ssd is given"
        only = "does not go with finetune profile --nodes, which measures the network: leave it out"
        read = f"{_OF_CLUSTER} {_OF_NODES} output gpu dtype train_vision"
        yield self.command != "profile", _options_but(read), only

    def _rules_of_plans(self) -> Iterator[Rule]:
        if self.plans_cluster:
            nothing = "changes nothing in a plan for a cluster (bf16, with the hardware that --cluster describes): "
            yield False, _options_but(f"{_OF_CLUSTER} {_IN_MEMORY}"), f"{nothing}leave it out"
            return
        yield False, f"{_IN_MEMORY} levels", "belongs to plans for a cluster: add --cluster"
        yield self.nodes is not None, "network", "connects several nodes: add --nodes N"
        yield self.nodes is not None, "gpus_per_node", _ALONE
        yield self.nodes is None, "max_model", "is for one node: leave --nodes out"
        by_name = "does not go with --drive, which plans for hardware by name: leave it out"
        yield self.drive is None, "ssd output resume", by_name

    def _check_objective(self) -> None:
        objective, traits = self.objective, self.traits
        for name in SPECIFIC.difference(traits.options):
            *some, last = readers(name)
            others = f"{', '.join(some)} or {last}" if some else last
            self._apply([(False, name, f"is not known to --objective {objective}: it is for {others}")])
        if not traits.outputs:
            return
        if not (self.command in ("plan", "profile") or self.data):
            raise UserError(f"--objective {objective} {traits.learns}: give --data with {traits.data}.")
        if self.nodes is not None and not self.ssd and self.command != "plan":
            raise UserError(
                f"--objective {objective} does not go with --nodes in memory: give each node drives, --ssd, or write "
                "the loop with fuyou.Engine.tokens, which several ranks can call."
            )

    @property
    def plans_cluster(self) -> bool:
        """Whether it is a plan for a cluster that trains in memory."""
        return bool(self.cluster or self.levels or (self.nodes and self.drive is None))

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
        given["model"] = options.get("model") or (DEFAULT_PROFILE_MODEL if more.get("command") == "profile" else "")
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
        from common.models.adapters.options import ALL_LINEAR, AdapterOptions, load_peft_config

        if self.peft_config is not None:
            return load_peft_config(self.peft_config)
        if self.lora_rank is None:
            return None
        return AdapterOptions(self.lora_rank, self.lora_alpha, self.lora_dropout, self.lora_targets or (ALL_LINEAR,))

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
        return self.nodes is not None and not self.ssd

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
        return [path / self.store_name for path in [*self.drives, *self.drives_to_leave] or [self.output_directory]]

    @property
    def store_name(self) -> str:
        if self.in_memory:
            return COMMITS
        if not self.ssd:
            return "store"
        # The same drives serve many runs: a run is named after its output directory, as that was called when it began.
        output = self.output_directory
        if self.resume:
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
                name = json.loads((output / RUN / DESCRIPTION).read_text())["store"]
                if isinstance(name, str) and name.startswith(STORE_PREFIX) and Path(name).name == name:
                    return name
        return f"{STORE_PREFIX}{output.name}-{hashlib.sha256(str(output).encode()).hexdigest()[:6]}"

    def configuration(self, dtype: str) -> str:
        """Return all options of the run as TOML, with the dtype that was chosen, for another machine."""
        context = self.context or parse_command_line(self.arguments)
        context.meta.setdefault(WRITTEN, {})["dtype"] = dtype
        return effective_config(context, of_run=True)

    @property
    def how_to_continue(self) -> str:
        """The command that continues this run, as a sentence."""
        words = [
            word
            for before, word in pairwise(("", *self.arguments))
            if word not in ("--overwrite", "--no-overwrite")
            and not word.startswith("--resume")
            and (before, word) not in (("--resume", "auto"), ("--resume", "no"))
        ]
        return f"To continue: {shlex.join(['finetune', *words, '--resume'])}"


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
    return paths


def settings_of(command: str, context: click.Context, arguments: tuple[str, ...]) -> Settings:
    """Return what a command line asks for; of a continued run, with the run's own options where they are left out."""
    changes: tuple[str, ...] = ()
    if command == "train" and (context.params["resume"]):
        context, changes = with_own_options(context, arguments)
    settings = Settings.of_options(context.params, arguments, command=command, context=context, changes=changes)
    if command == "plan":
        settings.check_plan()
    return settings


def with_own_options(context: click.Context, arguments: Iterable[str]) -> tuple[click.Context, tuple[str, ...]]:
    """Return a command line whose left out options have the run's own values, and what differs, for people."""
    file = output_directory(context.params["output"], context.params["model"] or "") / RUN / CONFIG
    if not file.is_file():
        return context, (f"{file} is missing: options that are left out have their defaults",)
    stored = parse_command_line(["--config", str(file)])
    continued = parse_command_line(arguments, stored.default_map)
    return continued, tuple(_changes(stored, continued))


def _changes(stored: click.Context, now: click.Context) -> Iterable[str]:
    for option in options_in_files(now):
        before, after = stored.params[option.name or ""], now.params[option.name or ""]
        # Paths are equal where they are when absolute. Options of a call have no value in a run's own configuration.
        is_same = option_as_toml(stored, option, of_run=True) == option_as_toml(now, option, of_run=True)
        takes_own = option.name == "dtype" and after == "auto"
        if not (before == after or is_same or takes_own):
            yield f"{option.typed(after)} instead of {option.typed(before)}"


def _options_but(names: str) -> str:
    return " ".join(field.name for field in option_fields(Settings) if field.name not in names.split())
