"""One run of ``finetune``: what was requested, checked for what can be checked without looking at the machine."""

import contextlib
import dataclasses
import glob
import hashlib
import json
import shlex
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from cli.options.all_options import (
    AdapterSettings,
    ClusterSettings,
    DataSettings,
    MemorySettings,
    ModelSettings,
    ObjectiveSettings,
    OtherSettings,
    OutputSettings,
    PlanningSettings,
    TrainingSettings,
)
from cli.options.command import with_resume_auto
from cli.options.data_words import split_weight
from cli.options.objectives import OBJECTIVES, SPECIFIC, ObjectiveTraits, readers
from cli.options.option import Only, declaration_of, option_fields, spelled
from common.errors import UserError

COMMITS = "commits"
"""Folder inside the output directory where a run of several ranks has its commits."""

RUN, DESCRIPTION, CONFIG = "run", "run.json", "config.toml"
"""Folder inside the output directory that describes the run, and files in it: one names the run's store, one has all
options."""

STORE_PREFIX = "fuyou-"
"""Beginning of the names of runs' folders on the SSDs."""

DEFAULT_PROFILE_MODEL = "gpt3-1.3b"
"""For --profile without --model: a block large enough to show what a device can do, and quick on a CPU."""


@dataclass(frozen=True, kw_only=True)
class Settings(
    OtherSettings,
    PlanningSettings,
    OutputSettings,
    AdapterSettings,
    ObjectiveSettings,
    TrainingSettings,
    ClusterSettings,
    MemorySettings,
    DataSettings,
    ModelSettings,
):
    """All options of one call, flat: ``settings.lr``. Dataclasses take the fields of the last base first."""

    arguments: tuple[str, ...] = ()
    """The command line itself, to say how to continue."""
    context: click.Context | None = dataclasses.field(default=None, compare=False, repr=False)
    """The command line as it was parsed, with what a file or the continued run adds to it."""
    changes: tuple[str, ...] = ()
    """What differs from the options of the continued run, for people."""
    started_at: float = dataclasses.field(default_factory=time.time, compare=False)
    """When this call began, in seconds since 1970."""

    def __post_init__(self) -> None:
        self._check_data()
        self._check_saving()
        self._check_adapters()
        if self.sample is None:
            self._refuse(Only.SAMPLE, "is about a sample: add --sample PROMPT")
        self._check_objective()
        if not self.plan:  # which takes any number of devices that are not here
            self._check_nodes()

    def _check_data(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise UserError(f"--steps {self.steps} and --epochs {self.epochs:g} exclude each other: give one of them.")
        if self.epochs is not None and not self.data:
            raise UserError(
                f"--epochs {self.epochs:g} counts passes over data, and there is none: give --data, or --steps instead."
            )
        evaluates = bool(self.eval_data) or self.eval_split is not None
        for name in ("eval_every", "patience"):
            value = getattr(self, name)
            if value is not None and not evaluates:
                what = "steps between evaluations" if name == "eval_every" else "evaluations"
                raise UserError(
                    f"{spelled(name)} {value} counts {what}, and there is no data for them: add --eval-data, or "
                    "--eval-split."
                )
        if self.patience is not None and self.eval_every is None:
            raise UserError(f"--patience {self.patience} counts evaluations: add --eval-every N.")
        if self.eval_split is not None and self.eval_data:
            raise UserError("--eval-split and --eval-data both say what to evaluate with: give one of them.")
        for name in ("eval_split", "columns", "max_records", "show_data"):
            if getattr(self, name) not in (None, ()) and not self.data:
                raise UserError(f"{spelled(name)} is about the records of --data: add that.")
        if not self.truncate and not (self.data or self.eval_data):
            raise UserError("--drop-long is about records that are longer than --seq-len: add --data.")
        if self.min_lr > self.highest_lr:
            raise UserError(f"--min-lr {self.min_lr:g} is more than --lr {self.highest_lr:g}.")

    def _check_saving(self) -> None:
        if self.export and not self.resume:
            raise UserError("--export writes the result of an existing run: add --resume.")
        if self.sample is not None and not self.save:
            raise UserError("--sample generates with the saved result: leave --no-save out.")
        if self.keep != 2 and self.save_every is None:
            raise UserError(f"--keep {self.keep} counts checkpoints of --save-every: add that.")
        if self.resume and self.overwrite:
            raise UserError("--resume continues the run that is there and --overwrite replaces it: give one of them.")
        if self.leave_ssd and not (self.resume and self.ssd):
            raise UserError("--leave-ssd needs --resume, and --ssd for the drives that stay.")

    def _check_adapters(self) -> None:
        says = [name for name in ("lora_rank", "peft_config", "adapter") if getattr(self, name) is not None]
        if len(says) > 1:
            both = " and ".join(map(spelled, says[:2]))
            raise UserError(f"{both} both say what the adapters are: give one of them.")
        if self.adapter is not None:
            self._refuse(Only.LORA, f"is what the adapters of --adapter {self.adapter} have already: leave it out")
        if self.lora_rank is None:
            self._refuse(Only.LORA, "is about LoRA adapters: add --lora-rank, or put it into --peft-config's file")
        if self.frozen_dtype is not None and not self.trains_adapters:
            raise UserError(
                f"--frozen-dtype {self.frozen_dtype} is about weights that are frozen: add --lora-rank, --peft-config "
                "or --adapter."
            )
        if self.merge and not self.trains_adapters:
            raise UserError("--merge merges adapters into the weights: add --lora-rank, --peft-config or --adapter.")

    def _check_nodes(self) -> None:
        if self.nodes is None:
            self._refuse(Only.NODES, "is for several nodes or ranks: add --nodes N (1 for this machine alone)")
            return
        if self.strategy not in (None, "auto"):
            self._refuse(Only.CHOSEN_STRATEGY, "is for choosing a strategy: give --strategy auto, or none")
        self._refuse(Only.ONE_MACHINE, "does not go with --nodes yet: leave it out")
        if self.ssd:
            self._refuse(Only.IN_MEMORY, "is for training in memory, without --ssd: leave one of them out")
        else:
            self._refuse(Only.OUT_OF_CORE, "does not go with --nodes, which trains in memory unless --ssd is given")

    def _check_objective(self) -> None:
        objective, traits = self.objective, self.traits
        for field in option_fields(ObjectiveSettings):
            name = field.name
            if name in SPECIFIC.difference(traits.options) and getattr(self, name) != field.default:
                *some, last = readers(name)
                others = f"{', '.join(some)} or {last}" if some else last
                raise UserError(f"{spelled(name)} is not known to --objective {objective}: it is for {others}.")
        if self.dropout and not traits.compares:
            raise UserError(f"--dropout is for dpo, kto, or reward: --objective {objective} always has it.")
        if not traits.outputs:
            return
        if not (self.plan or self.profile or self.data):
            raise UserError(f"--objective {objective} {traits.learns}: give --data with {traits.data}.")
        if traits.classifies and self.sample is not None:
            raise UserError(f"--sample generates text, which a model of --objective {objective} cannot: leave it out.")
        if self.nodes is not None and not self.ssd and not self.plan:
            raise UserError(
                f"--objective {objective} does not go with --nodes in memory: give each node drives, --ssd, or write "
                "the loop with fuyou.Engine.tokens, which several ranks can call."
            )

    @property
    def traits(self) -> ObjectiveTraits:
        """What is known about the objective."""
        return OBJECTIVES[self.objective]

    def _refuse(self, only: Only, why: str) -> None:
        for field in option_fields(Settings):
            if declaration_of(field).only & only and getattr(self, field.name) != field.default:
                raise UserError(f"{spelled(field.name)} {why}.")

    @classmethod
    def of_options(cls, options: Mapping[str, Any], arguments: tuple[str, ...], **more: Any) -> "Settings":
        """Return what a parsed command line asks for; patterns are expanded.

        Args:
            options: values by name.
            arguments: the command line.
            more: fields that are no options.

        Raises:
            UserError: they do not go together, or a pattern matches nothing.
        """
        given = dict(options)
        for field in option_fields(cls):
            if declaration_of(field).patterns:
                words = options[field.name]
                # What has a weight is one data set, however many files there are in it: it is expanded when opened.
                given[field.name] = tuple(
                    path
                    for word in words
                    for path in (
                        [word]
                        if field.name == "data" and split_weight(word)[1] is not None
                        else expand_pattern(spelled(field.name), word)
                    )
                )
        given["model"] = options["model"] or (DEFAULT_PROFILE_MODEL if options["profile"] else "")
        return cls(**given, arguments=arguments, **more)

    def named(self, names: Collection[str]) -> dict[str, Any]:
        """Return options by name, as the engine and the trainer take them, in whose words some mean other values.

        Args:
            names: of what is wanted; those that are no option's are left out.
        """
        values = {field.name: getattr(self, field.name) for field in option_fields(Settings)} | {
            "lr": self.highest_lr,
            "betas": (self.beta1, self.decay_of_squares),
            "commit_every": self.commit_interval,
            "max_grad_norm": self.max_grad_norm or None,
        }
        return {name: value for name, value in values.items() if name in names}

    @property
    def highest_lr(self) -> float:
        """The highest learning rate: as it is requested, else what usually works."""
        if self.lr is not None:
            return self.lr
        return 2e-4 if self.trains_adapters and not self.traits.needs_reference else 1e-5

    @property
    def decay_of_squares(self) -> float:
        """The second beta: as it is requested, else as the optimizer's authors have it."""
        if self.beta2 is not None:
            return self.beta2
        from fuyou.layout.optimizer_state import OPTIMIZERS

        return OPTIMIZERS[self.optimizer].betas[1]

    @property
    def trains_adapters(self) -> bool:
        """Whether the weights are frozen and adapters are trained."""
        return not (self.lora_rank is None and self.peft_config is None and self.adapter is None)

    @property
    def commit_interval(self) -> int:
        """Number of steps from one commit to the next. In memory, each writes 12 bytes per parameter."""
        return self.commit_every or (1 if self.nodes is None or self.ssd else 100)

    @property
    def output_directory(self) -> Path:
        """Absolute path of the output directory."""
        return output_directory(self.output, self.model)

    @property
    def store_name(self) -> str:
        """Name of the store's directory on each drive."""
        if self.nodes is not None and not self.ssd:
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

    @property
    def how_to_continue(self) -> str:
        """The command that continues this run, as a sentence."""
        undone = {"--resume", "--no-resume", "--resume-auto", "--no-resume-auto", "--overwrite", "--no-overwrite"}
        words = [word for word in with_resume_auto(self.arguments) if word not in undone]
        return f"To continue: {shlex.join(['finetune', *words, '--resume'])}"


def output_directory(output: Path | None, model: str) -> Path:
    """Return the absolute path of the output directory of a run of ``--model`` with ``--output``."""
    if output is not None:
        return output.expanduser().absolute()
    return (Path("finetune-output") / Path(model).expanduser().absolute().name).absolute()


def expand_pattern(option: str, name: str) -> list[str]:
    """Return what a quoted pattern stands for, sorted; a name that exists, or has no pattern signs, is itself.

    Raises:
        UserError: nothing matches.
    """
    path = str(Path(name).expanduser())
    if Path(path).exists() or not glob.has_magic(path):
        return [name]
    paths = sorted(glob.glob(path, recursive=True))
    if not paths:
        raise UserError(f"{option} {name}: nothing matches this pattern.")
    return paths
