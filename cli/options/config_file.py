"""Options as TOML: the file that ``--config`` reads, and that each run writes.

Keys are the names of options without their dashes, in tables named after the headings of ``--help``, or in none. Values
are written as on the command line, numbers and ``true`` without quotation marks, several words as a list.
"""

import json
import re
import textwrap
import tomllib
from collections.abc import Iterable, Mapping
from glob import has_magic
from pathlib import Path
from typing import Any

import click

from cli.options.all_options import HEADINGS, AllOptions
from cli.options.option import WRITTEN, GroupedOption, split_weight
from cli.options.recipes import recipe_file
from common.errors import UserError, did_you_mean
from common.files import read_text_file
from common.options import declaration_of, option_fields

_WIDTH = 116
# Numbers that TOML and the command line write alike
_NUMBER = re.compile(r"(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")


OTHER_TOOLS = {
    "model-name-or-path": "--model", "base-model": "--model", "dataset": "--data", "dataset-name": "--data",
    "datasets": "--data", "train-file": "--data", "output-dir": "--output", "learning-rate": "--lr",
    "num-train-epochs": "--epochs", "num-epochs": "--epochs", "max-steps": "--steps", "max-length": "--seq-len",
    "max-seq-length": "--seq-len", "sequence-len": "--seq-len", "cutoff-len": "--seq-len",
    "per-device-train-batch-size": "--batch-size, the sequences of a whole step",
    "gradient-accumulation-steps": "--batch-size, the sequences of a whole step (--micro-batch: computed at once)",
    "micro-batch-size": "--micro-batch", "warmup-steps": "--warmup", "warmup-ratio": "--warmup",
    "lr-scheduler-type": "--schedule", "lr-scheduler": "--schedule", "optim": "--optimizer", "bf16": "--dtype bf16",
    "lora": "--lora-rank 16", "lora-r": "--lora-rank", "use-peft": "--lora-rank 16", "qlora": "--lora-rank 16 "
    "--frozen-dtype nf4", "load-in-4bit": "--frozen-dtype nf4", "load-in-8bit": "--frozen-dtype int8",
    "lora-target": "--lora-targets", "lora-target-modules": "--lora-targets", "save-steps": "--save-every",
    "eval-steps": "--eval-every", "logging-steps": "--log-every", "chat": "finetune chat",
    "resume-from-checkpoint": "--resume", "save-total-limit": "--keep", "template": "--chat-template",
    "chat-template-path": "--chat-template", "val-size": "--eval-split", "val-set-size": "--eval-split",
    "quantization-bit": "--frozen-dtype nf4", "stage": "--objective", "rl": "--objective",
    "adapter-name-or-path": "--adapter", "lora-model-dir": "--adapter", "push-to-hub": "hf upload OWNER/NAME DIR",
    "report-to": "--log-to", "report": "OUTPUT/run/metrics.jsonl",
    "packing": "the default", "sample-packing": "the default", "gradient-checkpointing": "the default",
    "deepspeed": "--ssd DIR... to offload, or --nodes N to shard", "fsdp": "--nodes N",
    "use-gradient-checkpointing": "the default", "load-best-model-at-end": "OUTPUT/checkpoints/best (--eval-every)",
    "sample": "finetune chat", "generate": "finetune chat", "help": "finetune --help",
    "merge": "finetune export --model DIR --adapter OUTPUT --output MERGED",
}  # fmt: skip
"""Options here by their names in transformers' Trainer, TRL, LLaMA-Factory, unsloth, axolotl, and earlier versions."""
REMOVED: dict[str, Any] = {
    "optimizer-dtype": "fp32", "on-nonfinite": "stop", "merge": False, "dropout": False, "sample-tokens": 32,
    "resume-auto": False,
}  # fmt: skip
"""Options that files of earlier versions set, and the value that is the only one now."""
_COMMANDS = ("plan", "check", "profile", "verify", "demo")


def instead_of(name: str) -> str | None:
    """Return what to do instead of using an option, named as typed or as a key in a file; None: nothing is known."""
    known = name.lstrip("-").replace("_", "-")
    if known in OTHER_TOOLS:
        return f"No such option: {name}. Here it is {OTHER_TOOLS[known]}."
    return f"{name} is a command: finetune {known}." if known in _COMMANDS else None


def load_config_file(ctx: click.Context, param: click.Parameter, file: Path | None) -> Path | None:
    """Make what is in the file the default of all other options, before those of a run that is continued.

    click calls this for ``--config``.
    """
    if file is None or ctx.resilient_parsing:
        return file
    path = file.expanduser()
    if not path.exists() and path.name == str(file) and path.suffix != ".toml":
        path = recipe_file(str(file))
    try:
        content = tomllib.loads(read_text_file(path).removeprefix("\ufeff"))
    except OSError as error:
        raise UserError(f"--config {file}: cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(
            f"--config {file}: this is not TOML: {error}. `finetune recipe qwen3-8b-lora` prints such a file."
        ) from error
    options = options_in_files(ctx)
    given = dict(_read(f"--config {file}", content, options))
    excluded = {
        name for option in options if option.name in given for name in option.declaration.excludes.split()
    } - given.keys()
    before = {name: value for name, value in (ctx.default_map or {}).items() if name not in excluded}
    ctx.default_map = before | given
    return file


def options_in_text(where: str, text: str, ctx: click.Context) -> dict[str, Any]:
    """Return the options in ``text``, as :func:`plain_options` returned it, by name."""
    try:
        return dict(_read(where, tomllib.loads(text), options_in_files(ctx)))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{where} are damaged: {error}") from error


def plain_options(config: str) -> str:
    """Return what :func:`effective_config` returned without its headings and comments."""
    return "".join(f"{line}\n" for line in config.splitlines() if line[:1] not in ("", "#", "["))


def options_in_files(ctx: click.Context) -> list[GroupedOption]:
    options = [option for option in ctx.command.params if isinstance(option, GroupedOption)]
    return [option for option in options if option.name != "config"]


def _read(where: str, content: Mapping[str, Any], options: list[GroupedOption]) -> Iterable[tuple[str, Any]]:
    fields = [field for field in option_fields(AllOptions) if field.name != "config"]
    flags = "/".join(filter(None, (declaration_of(field).flags for field in fields))).split("/")
    of_any = {field.name for field in fields} | {flag.removeprefix("--").replace("-", "_") for flag in flags}
    by_key = {
        name.removeprefix("--"): option
        for option in options
        for name in (*option.opts, *option.secondary_opts)
    }
    tables = {heading.lower() for heading in HEADINGS}
    entries: list[tuple[str, Any]] = []
    for key, value in content.items():
        if not isinstance(value, dict):
            entries.append((key, value))
        elif key in tables:
            entries += value.items()
        else:
            raise UserError(f"{where}: there is no table [{key}].{did_you_mean(key, tables)}")
    seen: set[str] = set()
    for key, value in entries:
        option = by_key.get(key.replace("_", "-"))
        if option is None or option.name is None:
            instead = instead_of(key)
            if key.replace("-", "_").removeprefix("no_") in of_any or (instead and value is False):
                continue
            if key in REMOVED:
                if value == REMOVED[key]:
                    continue
                raise UserError(f"{where}: {key} was removed; {REMOVED[key]} is the only choice now.")
            hint = instead or f"there is no option {key!r}.{did_you_mean(key.replace('_', '-'), by_key)}"
            raise UserError(f"{where}: {hint}")
        if option.name in seen:
            raise UserError(f"{where}: {key!r} is set twice. Set it once.")
        seen.add(option.name)
        negated = f"--{key.replace('_', '-')}" in option.secondary_opts
        yield option.name, _value(f"{where}: {key}", value, option, negated)


def _value(where: str, value: Any, option: GroupedOption, negated: bool) -> Any:
    if option.declaration.alone and isinstance(value, bool):
        return value
    if option.is_flag:
        if not isinstance(value, bool):
            raise UserError(f"{where} is either true or false, not {value!r}.")
        return value != negated
    words = value if isinstance(value, list) else [value]
    for word in words:
        if isinstance(word, bool) or not isinstance(word, str | int | float):
            raise UserError(f"{where} = {json.dumps(value, default=str)} is not a value for {option.shown}.")
    if option.words:
        return tuple(str(word) for word in words)
    if isinstance(value, list):
        raise UserError(f"{where} takes one value, not a list.")
    return str(value)


def effective_config(ctx: click.Context, *, of_run: bool = False) -> str:
    """Return all options of a parsed command line as TOML, grouped; those without a value are commented out.

    What is kept with a run (``of_run``) has paths that do not depend on the working directory, and options that belong
    to a call have no value.
    """
    groups: dict[str, list[str]] = {}
    for option in options_in_files(ctx):
        if option.hidden:
            continue
        lines = textwrap.wrap(option.help or "", _WIDTH, initial_indent="# ", subsequent_indent="# ")
        entry = "\n".join([*lines, option_as_toml(ctx, option, of_run=of_run)])
        groups.setdefault(option.group, []).append(f"{entry}\n")
    return "\n".join(f"[{heading.lower()}]\n" + "\n".join(entries) for heading, entries in groups.items())


def option_as_toml(ctx: click.Context, option: GroupedOption, *, of_run: bool) -> str:
    """Return an option's key and its value in a parsed command line; arguments as in :func:`effective_config`."""
    value = ctx.meta.get(WRITTEN, {}).get(option.name, option.plain_default)
    if of_run and option.declaration.of_call:
        value = option.plain_default
    key = option.shown.removeprefix("--")
    if option.is_flag:
        value = bool(value) != (option.shown in option.secondary_opts)
    if isinstance(value, bool):
        return f"{key} = {'true' if value else 'false'}"
    if value is None or value == ():
        return f"# {key} = {option.metavar or '...'}"
    written = [_toml(option, word, of_run) for word in (value if option.words else [value])]
    return f"{key} = [{', '.join(written)}]" if option.words else f"{key} = {written[0]}"


def _toml(option: GroupedOption, value: Any, absolute: bool) -> str:
    text = str(value)
    name, weight = split_weight(text) if option.name == "data" else (text, None)
    if absolute and weight is not None:
        text = f"{Path(name).expanduser().absolute()}={weight:g}"
    elif absolute and (isinstance(option.type, click.Path) or _names_a_path(option, text)):
        text = str(Path(text).expanduser().absolute())
    elif option.type is not click.STRING and _NUMBER.fullmatch(text):
        return text
    return json.dumps(text, ensure_ascii=False)  # JSON's strings are TOML's, too


def _names_a_path(option: GroupedOption, text: str) -> bool:
    declared = option.declaration
    path = Path(text).expanduser()
    return (option.words or declared.may_be_path(text)) and (
        path.exists() or (declared.patterns and has_magic(text))
    )
