"""Every option of ``finetune``: a class for each heading of the help, and the engine's own groups.

The first paragraph of a field's docstring is its help. Commands, ``--config`` files, completion, and docs/options.md
are generated from these classes, and :class:`cli.options.settings.Settings` inherits them all.
"""

import re
from dataclasses import Field, dataclass
from functools import cache
from inspect import get_annotations
from pathlib import Path
from typing import Any

from cli.options.objectives import HELP, OBJECTIVES
from cli.options.option import check_column, check_name, parse_part, parse_resume
from cli.options.schedule import SCHEDULES, Warmup
from common.docstrings import attribute_docstrings
from common.options import (
    ABOVE_ZERO,
    BELOW_ONE,
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    Command,
    FiniteFloat,
    ParsedValue,
    TokenCount,
    declaration_of,
    option,
    option_fields,
    spelled,
)
from fuyou.option_groups import EngineOptions

TRACKERS = ("tensorboard", "wandb", "mlflow", "comet_ml", "aim", "clearml", "dvclive", "swanlab", "trackio")
"""Trackers that accelerate has, by the names of their packages."""


@dataclass(frozen=True, kw_only=True)
class OutputSettings:
    """What a run writes, and what it does with an earlier run."""

    output: Path | None = option(None, "DIR", commands=Command.MODEL | Command.EXPORT | Command.DEMO)
    """Directory for the checkpoint and everything else the run writes. Default: finetune-output/<model>."""
    save: bool = option(True)
    """Write no checkpoint at the end."""
    save_every: int | None = option(None, "N", POSITIVE)
    """Steps between checkpoints in <output>/checkpoints/step-N; with evaluations, checkpoints/best is the best."""
    keep: int = option(2, "K", POSITIVE, needs="save_every")
    """How many checkpoints of --save-every to keep."""
    export: bool = option(False, excludes="save", of_call=True, hidden=True, needs="resume")
    """With --resume: take no step, and write the checkpoint of the last committed step, as finetune export does."""
    log_every: int = option(1, "N", POSITIVE)
    """Print a line every N steps where the output is not a terminal."""
    log_to: tuple[str, ...] = option((), "NAME...", TRACKERS, may_differ=True)
    """Send the figures of every step to trackers, too: tensorboard (in <output>/run), wandb, mlflow, ..."""
    eval_every: int | None = option(None, "N", POSITIVE, needs="eval_data eval_split", heading="Data")
    """Steps between further evaluations."""
    patience: int | None = option(None, "N", POSITIVE, needs="eval_every", heading="Training")
    """Stop when N evaluations in a row have found no lower loss."""
    max_hours: float | None = option(None, "X", ABOVE_ZERO, of_call=True, heading="Training")
    """Stop cleanly after this many hours, with exit status 0, for schedulers' time limits. Continue with --resume."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """What is trained."""

    model: str = option("", "DIR|PRESET", presets="models", commands=Command.SOURCE | Command.CHAT)
    """Checkpoint directory, GGUF file, preset (random weights), or hub name (owner/name) in the local cache."""
    download: bool = option(False, commands=Command.SOURCE | Command.CHAT)
    """Download --model or --data if it is a hub name (owner/name) that is not in the local cache yet."""


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The training and evaluation data, and how much of it a step takes."""

    data: tuple[str, ...] = option((), "FILE...", patterns=True, commands=Command.RUN | Command.EVALUATE)
    """Files (.jsonl .json .csv .tsv .parquet .txt .arrow, also .gz), directories (their train split, or
    directory:split), quoted patterns, or hub data sets in the local cache (owner/name, owner/name:split). FILE=0.7
    sets a data set's share of all rows. random: random tokens, to measure throughput."""
    columns: tuple[str, ...] = option(
        (),
        "NAME=COLUMN...",
        ParsedValue("column", check_column),
        commands=Command.RUN | Command.EVALUATE,
        needs="data eval_data",
    )
    """Map your column names: prompt=question completion=answer."""
    max_records: int | None = option(None, "N", POSITIVE, needs="data")
    """Take only the first N records of each data set."""
    chat_template: str | None = option(
        None, "NAME|FILE", presets="chat_templates", commands=Command.RUN | Command.EVALUATE
    )
    """Chat template instead of the tokenizer's, saved with the result: alpaca, chatml, gemma, llama-3, mistral,
    zephyr, or a Jinja file."""
    show_data: int | None = option(None, "N", POSITIVE, of_call=True, needs="data")
    """Train nothing: print N rows as the model sees them, with what carries loss in color."""
    seq_len: int | None = option(None, "N", TokenCount(min=2), commands=Command.SHAPE)
    """Tokens per sequence, also as 64K or 1M. Default: 1024, or the model's context if that is shorter."""
    batch_size: int = option(8, "N", POSITIVE, commands=Command.SHAPE, fixed=True)
    """Sequences per step."""
    truncate: bool = option(
        True,
        flags="--truncate/--drop-long",
        fixed=True,
        commands=Command.RUN | Command.EVALUATE,
        needs="data eval_data",
    )
    """Leave out conversations and prompts with completions longer than --seq-len. By default (--truncate) they are
    cut after the last answer that fits. Both are counted; plain text continues in the next row."""
    drop_unseen: bool = option(False, commands=Command.RUN | Command.EVALUATE)
    """Count and leave out conversations with text that the chat template leaves out. Default: an error."""
    eval_data: tuple[str, ...] = option((), "FILE...", patterns=True, commands=Command.RUN | Command.EXPORT)
    """Held-out data: loss and perplexity before the first and after the last step, and before and after a merge."""
    eval_split: float | None = option(
        None, "FRACTION", ParsedValue("fraction", parse_part), excludes="eval_data", needs="data"
    )
    """Hold out this share of the records of each data set instead of --eval-data: 2% or 0.02."""


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """Where parameters and states are stored, and what computes."""

    gpu: str = option("auto", "auto|cpu|NAME|INDEX|FILE", presets="gpus", commands=Command.SHAPE)
    """Device to train on. In plans also a GPU's .toml file, in the form of configs/gpus."""
    train_vision: str | None = option(
        None, type=("projector", "all"), commands=Command.MODEL, excludes="adapter"
    )
    """Also train the projector of a vision-language model, or all that turns images into tokens. Default: neither."""


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """Several machines, or several GPUs of one."""

    nodes: int | None = option(None, "N", POSITIVE, commands=Command.STEP)
    """Train on N machines together: sharded over all GPUs in memory, or out of core with --ssd. Run the same line
    on each."""
    gpus_per_node: int | None = option(None, "M", POSITIVE, commands=Command.STEP, may_differ=True)
    """Ranks per machine. Default: its GPUs; 1 with --gpu cpu."""
    rdzv_endpoint: str | None = option(None, "HOST:PORT", commands=Command.STEP, may_differ=True)
    """Rendezvous: one of the nodes, and a free port there. Default: from srun or MASTER_ADDR."""
    node_timeout: int = option(1800, "SECONDS", POSITIVE, commands=Command.STEP, may_differ=True)
    """How long to wait for a node that does not come, and in a collective for a rank that does not answer."""
    max_restarts: int = option(3, "N", COUNT, commands=Command.STEP)
    """How often to restart from the last commit after a rank is lost."""
    # Which strategies there are is checked where they are known: that takes long to import.
    strategy: str | None = option(None, "NAME|P/G/OS")
    """In memory, how parameters, gradients, and optimizer states are sharded: fcdp (parameters cached in host
    memory), zero3, hybrid, zero2, paro-iig, ..., or their scopes, IGG or 4x1/4x1/8x1 (docs/strategies.md). Default:
    auto, the planner's choice for --cluster."""
    device_cache_threshold: float = option(0.9, "X", FiniteFloat(min=0, max=1))
    """Share of device memory up to which cached parameters stay there."""


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The steps and the optimizer."""

    steps: int | None = option(None, "N", POSITIVE, excludes="epochs")
    """Steps to train. Default: one epoch with --data, 10 steps without."""
    epochs: float | None = option(None, "N", ABOVE_ZERO, excludes="steps", needs="data")
    """Passes over the data."""
    warmup: Warmup = option(Warmup(0), "N|FRACTION", ParsedValue("warmup", Warmup.parse))
    """Steps, or share of all steps (0.03 or 3%), in which the learning rate rises."""
    schedule: str = option("cosine", type=SCHEDULES, fixed=True)
    """How the learning rate falls afterwards."""
    min_lr: float = option(0.0, "X", NOT_NEGATIVE, fixed=True)
    """Lowest learning rate of the schedule."""
    beta1: float = option(0.9, "X", BELOW_ONE)
    """Decay of the mean of gradients."""
    beta2: float = option(0.999, "X", BELOW_ONE)
    """Decay of the mean of their squares."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """What is learned from the data."""

    objective: str = option(
        "sft", type=tuple(OBJECTIVES), commands=Command.STEP, fixed=True, values=f"{HELP}. "
    )
    """--batch-size counts pairs or texts. dpo compares with the model as the run found it, with its --adapter."""
    beta: float = option(0.1, "X", ABOVE_ZERO, fixed=True)
    """Strength of the preference (dpo)."""


@dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    """Frozen weights, and adapters that are trained instead."""

    lora_rank: int | None = option(
        None, "R", POSITIVE, commands=Command.MODEL, fixed=True, excludes="peft_config adapter"
    )
    """Train LoRA adapters of this rank, and freeze the weights."""
    lora_alpha: float | None = option(
        None,
        "X",
        ABOVE_ZERO,
        commands=Command.MODEL,
        fixed=True,
        needs="lora_rank",
        excludes="adapter peft_config",
    )
    """An adapter's output is multiplied by this over the rank. Default: twice the rank."""
    lora_dropout: float = option(
        0.0,
        "X",
        BELOW_ONE,
        commands=Command.MODEL,
        fixed=True,
        needs="lora_rank",
        excludes="adapter peft_config",
    )
    """Share of the adapters' inputs to drop in training."""
    lora_targets: tuple[str, ...] = option(
        ("dense-linear",),
        "NAME...",
        ParsedValue("name", check_name),
        commands=Command.MODEL,
        fixed=True,
        needs="lora_rank",
        excludes="adapter peft_config",
    )
    """Modules to adapt: q_proj v_proj; of fused experts gate_up_proj down_proj. dense-linear: attention and dense
    feed-forward layers. all-linear: routed experts and routers, too."""
    peft_config: Path | None = option(None, "FILE", commands=Command.MODEL, fixed=True, excludes="adapter")
    """An adapter_config.json of peft (or its directory): rsLoRA, DoRA, rank patterns, modules_to_save,
    trainable_token_indices."""
    adapter: Path | None = option(None, "DIR", commands=Command.SOURCE | Command.CHAT, fixed=True)
    """Directory of saved peft adapters to train further, with their method, rank, alpha, dropout, and targets."""


@dataclass(frozen=True, kw_only=True)
class PlanningSettings:
    """Plans, and the hardware that they are for."""

    drive: str | None = option(None, "NAME|FILE", presets="drives", commands=Command.PLAN, excludes="ssd")
    """Plan for drives of this kind, or of a .toml file in the form of configs/drives, and for the GPU of --gpu."""
    ssds: int | None = option(None, "N", POSITIVE, commands=Command.PLAN)
    """Number of drives to plan for.  [default: 1]"""
    network: str | None = option(None, "RATE", commands=Command.PLAN, needs="nodes")
    """Plan for several nodes with SSDs: what each sends, 25Gbit/s."""
    max_model: bool = option(False, commands=Command.PLAN, excludes="model nodes")
    """Plan the largest preset that fits."""
    compare: Path | None = option(
        None,
        "FILE",
        commands=Command.PLAN,
        excludes="gpu drive ssds ssd host_memory device_memory nodes gpus_per_node network max_model cluster levels "
        "html trace",
    )
    """Plan for each machine of a .toml file, with prices, in one table (examples/machines.toml)."""
    cluster: str | None = option(None, "PRESET|FILE|auto", presets="clusters")
    """Hardware to plan for, or to choose a strategy for: a preset, or a profile's file. Default in a run: auto,
    measured once per --output."""
    levels: str | None = option(None, "N,N,...", commands=Command.STEP)
    """A cluster's ranks by level, fastest first: 2,4,16 is 16 nodes of 4 pairs."""
    json: bool = option(False, commands=Command.PLAN)
    """Print the plan as JSON."""
    html: Path | None = option(None, "FILE", commands=Command.PLAN)
    """Draw the plan on a page: the step and the memory."""
    trace: Path | None = option(None, "FILE", commands=Command.PLAN)
    """Write the tasks of the planned step to this file, for ui.perfetto.dev."""


@dataclass(frozen=True, kw_only=True)
class OtherSettings:
    """Options in files, and errors."""

    config: Path | None = option(
        None, "FILE|RECIPE", presets="recipes", commands=Command.CONFIGURED, may_differ=True
    )
    """Take options from this TOML file, too, or from a recipe (finetune recipe lists them); the command line wins."""
    debug: bool = option(False, commands=Command.ALL, of_call=True, may_differ=True)
    """Show where an error came from."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings(EngineOptions):
    """The options of the engine (:mod:`fuyou.option_groups`). Those below differ from it in default, type, or help."""

    ssd: tuple[str, ...] = option((), "DIR...", patterns=True, commands=Command.SOURCE, heading="Memory")
    """Directories for parameters and optimizer states, one per drive. Default: inside --output."""
    leave_ssd: tuple[str, ...] = option(
        (),
        "DIR...",
        patterns=True,
        of_call=True,
        may_differ=True,
        heading="Memory",
        needs="ssd",
    )
    """With --resume: drives to remove from the run. Its records move to those of --ssd."""
    commit_every: int | None = option(  # type: ignore[assignment]
        None, "N", POSITIVE, heading="Output"
    )
    """Steps between commits: a crash loses at most this many steps. Default: 1; 100 with --nodes in memory."""
    resume: Any = option(  # a bool, or "auto" until it is decided
        False,
        "[auto|no]",
        ParsedValue("resume", parse_resume),
        alone=True,
        excludes="overwrite",
        of_call=True,
        may_differ=True,
        heading="Output",
    )
    """Continue from the last committed step. --resume auto starts a run if there is none."""
    overwrite: bool = option(
        False,
        commands=Command.RUN | Command.EXPORT,
        excludes="resume",
        of_call=True,
        may_differ=True,
        heading="Output",
    )
    """Replace the run that is in --output and --ssd."""
    lr: float | None = option(None, "X", NOT_NEGATIVE, heading="Training")  # type: ignore[assignment]
    """Highest learning rate. Default: 1e-5; 2e-4 for adapters (dpo: 1e-5)."""
    max_grad_norm: float = option(0.0, "X", NOT_NEGATIVE, heading="Training")
    """Scale gradients down to this global norm. 0: never."""
    seed: int = option(0, "N", COUNT, fixed=True, heading="Training")
    """Seed of the data's order, and of random weights and tokens."""


@dataclass(frozen=True, kw_only=True)
class AllOptions(
    EngineSettings,
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
    """All options, flat. Dataclasses take the fields of the last base first."""


HEADINGS: dict[str, type] = {
    "Model": ModelSettings,
    "Data": DataSettings,
    "Memory": MemorySettings,
    "Cluster": ClusterSettings,
    "Training": TrainingSettings,
    "Objective": ObjectiveSettings,
    "Adapters": AdapterSettings,
    "Output": OutputSettings,
    "Planning": PlanningSettings,
    "Other": OtherSettings,
}
"""The classes by their headings, in the order of the help."""


@cache
def declared_options() -> list[tuple[str, Field[Any], str]]:
    """Return the heading, the field, and the help of every option, heading by heading."""
    heading_of = {cls: heading for heading, cls in HEADINGS.items()}
    options = []
    for item in option_fields(AllOptions):
        declaring = next(cls for cls in AllOptions.__mro__ if item.name in get_annotations(cls))
        paragraph = attribute_docstrings(declaring)[item.name].split("\n\n")[0]
        declared = declaration_of(item)
        text = declared.values + re.sub("``([a-z_]+)``", lambda word: spelled(word[1]), paragraph)
        options.append((declared.heading or heading_of[declaring], item, text))
    return sorted(options, key=lambda option: list(HEADINGS).index(option[0]))
