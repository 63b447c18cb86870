"""The command ``finetune`` and its subcommands: their options are the fields of :mod:`cli.options.all_options`.

Imports nothing slow.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from cli.options.all_options import AllOptions, declared_options
from cli.options.config_file import OTHER_TOOLS, instead_of, load_config_file
from cli.options.option import WRITTEN, GroupedOption
from common.errors import did_you_mean
from common.options import Command, Declaration, declaration_of, option_fields, spelled

COMMANDS = {
    "train": "Train a model, or continue with --resume; without a command, finetune trains.",
    "plan": "Say whether a run fits, how fast it will be, and what bounds it.",
    "check": "Inspect this machine and its drives for potential problems; with --model, prove that it is exact.",
    "profile": "Measure this machine with a model; with --nodes, the cluster, and write a file for --cluster.",
    "verify": "Check that what runs have in DIR (as --ssd, or --output) is what was written.",
    "export": "Write the checkpoint of a run's last committed step, or merge --adapter into --model.",
    "evaluate": "Compute the loss of a model, or of --adapter on it, on data.",
    "chat": "Answer lines that you type with a model in memory, or with --adapter on it.",
    "recipe": "List ready files of options for --config, or print one.",
    "demo": "Teach a small chat model who it is (downloads 92 MB, once; offline, random weights are trained).",
}
"""Commands, and what they do."""

MOST_USED = ("model", "data", "output", "ssd", "epochs", "lr", "batch_size", "seq_len", "lora_rank", "resume")
"""Options that lead the help of ``finetune train``."""

EXAMPLES = {
    "Most used": "finetune --model ~/Llama-3-8B --data chats.jsonl --lora-rank 16 --output adapters",
    "Model": "finetune --model gpt3-13b --data random --steps 5 --no-save   # throughput on random tokens",
    "Data": "finetune --model ~/Llama-3-8B --data books/ notes.txt --seq-len 4096 --eval-data held-out.jsonl",
    "Memory": "finetune --gpu 4090 --ssd /mnt/nvme* --model gpt3-175b --host-memory 200GiB",
    "Cluster": "finetune --nodes 4 --rdzv-endpoint node0:29400 --model /shared/Llama-3-8B --data chats.jsonl\n"
    "srun --nodes 4 --ntasks-per-node 1 finetune --nodes 4 --model /shared/Llama-3-8B --data chats.jsonl\n"
    "finetune --nodes 1 --gpus-per-node 2 --model ~/Llama-3-8B --data chats.jsonl\n"
    "finetune --nodes 4 --rdzv-endpoint node0:29400 --ssd /mnt/nvme* --model /shared/Llama-65B --data chats.jsonl",
    "Training": "finetune --model ~/Llama-3-8B --data chats.jsonl --lr 2e-5 --warmup 3% --max-grad-norm 1",
    "Objective": "finetune --model ~/Llama-3-8B --data pairs.jsonl --objective dpo --beta 0.1 --lora-rank 16",
    "Adapters": "finetune --model ~/Llama-3-70B --data chats.jsonl --lora-rank 16 --lr 2e-4",
    "Output": "finetune --model ~/Llama-3-8B --data chats.jsonl --output tuned --save-every 500\n"
    "finetune --config tuned/run/config.toml --resume",
    "Planning": "finetune plan --gpu 4090 --drive p5510 --ssds 12 --host-memory 768GiB --model gpt3-13b",
    "Other": "finetune --config run.toml --lr 2e-5              # the command line wins over the file",
}
"""Command lines for each heading of the help of ``finetune train``."""

FIRST_EXAMPLES = """finetune --model ~/Llama-3-8B --data chats.jsonl --lora-rank 16 --output adapters
finetune --ssd /mnt/nvme* --model ~/Llama-3-8B --data chats.jsonl --epochs 2 --output tuned
finetune --output tuned --resume
finetune plan --gpu 4090 --drive p5510 --ssds 12 --host-memory 768GiB --model gpt3-13b
finetune check --ssd /mnt/nvme* --model ~/Llama-3-8B"""
"""Command lines for the help of ``finetune`` itself."""

_ALIASES = {f"--{name}": name for name in ("verify", "check", "profile", "demo", "plan")}
"""Commands by the flags that stand for them."""


def _show_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    try:
        click.echo(f"finetune {version('fuyou')}")
    except PackageNotFoundError:
        click.echo("finetune (not installed: run from its source)")
    ctx.exit()


class GroupedCommand(click.Command):
    """A command whose help has headings, and some of whose options take several words.

    click has options with a fixed number of values only. Shells expand ``--ssd /mnt/nvme*`` into one ``--ssd`` and
    several words: the option is repeated before each of them, and click sees what it knows.
    """

    @property
    def options(self) -> list[GroupedOption]:
        """All options, in the order of the help."""
        return [option for option in self.params if isinstance(option, GroupedOption)]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        names = {name for option in self.options if option.words for name in option.opts}
        if sum(word.partition("=")[0] == "--config" for word in args) > 1:
            raise click.UsageError(
                "--config can be given once: write the options of one file into the other.", ctx
            )
        try:
            rest = super().parse_args(ctx, repeat_option(args, names))
        except click.NoSuchOption as error:
            instead = instead_of(error.option_name) or _where_it_is(error.option_name, self.name or "")
            if instead is None:
                raise
            raise click.UsageError(instead, ctx) from None
        by_name = {option.name: option for option in self.options}
        for option in self.options:
            if ctx.get_parameter_source(option.name or "") is not ParameterSource.COMMANDLINE:
                continue
            for other in option.declaration.excludes.split():
                if ctx.get_parameter_source(other) is ParameterSource.DEFAULT_MAP:
                    ctx.meta[WRITTEN].pop(other, None)  # which is not there if its value was the default
                    ctx.params[other] = by_name[other].plain_default
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        trains, first = self.name == "train", {name: number for number, name in enumerate(MOST_USED)}
        groups: dict[str, list[tuple[str, str]]] = {}
        for option in sorted(
            self.options, key=lambda option: first.get(option.name or "", len(first)) if trains else 0
        ):
            record = option.get_help_record(ctx)
            if record is not None:
                heading = "Most used" if trains and option.name in first else option.group
                groups.setdefault(heading, []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records, col_max=28)
                if trains:
                    formatter.write_paragraph()
                    formatter.write("".join(f"  $ {line}\n" for line in EXAMPLES[heading].splitlines()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete options; a word that is none belongs to the option of several words before it, and is a path."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [CompletionItem(incomplete, type="file")]

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        option = super().get_help_option(ctx)
        flag = {"is_flag": True, "is_eager": True, "expose_value": False}
        return option and GroupedOption(
            ["-h", "--help"], "Other", Declaration(), help=option.help, callback=option.callback, **flag
        )


class Finetune(click.Group):
    """All commands, of which ``train`` is meant where none is named; each is made when it is used.

    ``run`` is called with the command's name and one keyword argument per option.
    """

    def __init__(self, run: Callable[..., int]) -> None:
        super().__init__(
            "finetune",
            params=[
                click.Option(
                    ["--version"], is_flag=True, is_eager=True, expose_value=False, callback=_show_version
                )
            ],
            help="Fine-tune a Hugging Face model that is larger than memory: parameters and optimizer states live on "
            "SSD.",
            context_settings={"max_content_width": 110, "help_option_names": ["-h", "--help"]},
        )
        self._run = run

    @property
    def options(self) -> list[GroupedOption]:
        """The options of all commands, each once."""
        commands = [self.get_command(None, name) for name in COMMANDS]
        return list({option.name: option for command in commands for option in command.options}.values())

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context | None, name: str) -> GroupedCommand:
        """Make a command."""
        member = Command[name.upper()]
        params: list[click.Parameter] = [
            GroupedOption.of_field(heading, field, text, load_config_file if field.name == "config" else None)
            for heading, field, text in declared_options()
            if member in declaration_of(field).commands
        ]
        if member is Command.VERIFY:
            params.append(click.Argument(["verify"], nargs=-1, required=True, metavar="DIR..."))
        if member is Command.RECIPE:
            complete = Declaration(presets="recipes").complete
            params.append(
                click.Argument(["recipe"], required=False, metavar="[NAME]", shell_complete=complete)
            )
        return GroupedCommand(
            name,
            params=params,
            callback=partial(self._run, name),
            help=COMMANDS[name],
            context_settings=self.context_settings,
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        is_completed = ctx.resilient_parsing and not args  # before the first word, which may be a command
        return super().parse_args(ctx, args if is_completed else with_command(args))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))
        with formatter.section("Examples"):
            formatter.write("".join(f"  $ {line}\n" for line in FIRST_EXAMPLES.splitlines()))
        formatter.write("\nfinetune train --help lists the options of a run, and docs/options.md all.\n")

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete commands, and the options of ``train``."""
        if incomplete.startswith("-"):
            return self.get_command(ctx, "train").shell_complete(ctx, incomplete)
        return super().shell_complete(ctx, incomplete)


def _where_it_is(option: str, command: str) -> str | None:
    for field in option_fields(AllOptions):
        declared = declaration_of(field)
        name = spelled(field.name)
        if option in (declared.flags or f"{name}/--no-{name[2:]}").split("/"):
            others = [other for other in COMMANDS if Command[other.upper()] in declared.commands]
            return (
                f"finetune {command} has no {option}, which is for finetune {' and finetune '.join(others)}."
            )
    return None


def with_command(words: Sequence[str]) -> list[str]:
    """Return a command line that begins with its command: ``--plan`` and others stand for one, and else it trains."""
    if words and (words[0] in COMMANDS or list(words) in (["-h"], ["--help"])):
        return list(words)
    if "--version" in words:
        return ["--version"]
    if words and not words[0].startswith("-"):
        known = "--resume" if words[0] == "resume" else OTHER_TOOLS.get(words[0])
        hint = f" Here it is {known}." if known else did_you_mean(words[0], COMMANDS)
        raise click.UsageError(f"There is no command {words[0]!r}.{hint}")
    for flag, name in _ALIASES.items():
        if flag in words:
            return [name, *(word for word in words if word != flag)]
    return ["train", *words]


def repeat_option(args: Sequence[str], names: set[str]) -> list[str]:
    """Turn ``--ssd a b`` into ``--ssd=a --ssd=b`` for the options in ``names``; all else stays.

    A word that begins with a dash is an option; a file of such a name is given as ``./-name``.
    """
    result: list[str] = []
    position = 0
    while position < len(args):
        name, equals, value = args[position].partition("=")
        position += 1
        if name not in names:
            result.append(args[position - 1])
            continue
        values = [value] if equals else []
        while position < len(args) and not (args[position].startswith("-") and len(args[position]) > 1):
            values.append(args[position])
            position += 1
        if not values and position < len(args):
            raise click.BadOptionUsage(name, f"Option {name!r} requires an argument.")
        # Click completes the value, or says that it lacks
        result += [f"{name}={value}" for value in values] or [name]
    return result


def parse_command_line(arguments: Iterable[str], defaults: Mapping[str, Any] | None = None) -> click.Context:
    """Return the context of a command line, without running anything.

    ``defaults`` are values, by name, of options that are neither in ``arguments`` nor in a file that they name.
    """
    group = Finetune(lambda name, **options: 0)
    name, *words = with_command(list(arguments))
    if name not in COMMANDS:
        return group.make_context("finetune", [name, *words])
    return group.get_command(None, name).make_context(name, words, default_map=dict(defaults or {}))
