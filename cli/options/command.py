"""The command ``finetune``: its options are the fields of :mod:`cli.options.all_options`. Imports nothing slow."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from cli.options.all_options import GROUPS
from cli.options.config_file import load_config_file
from cli.options.option import WRITTEN, GroupedOption, option_fields
from cli.options.removed import instead_of
from common.docstrings import attribute_docstrings

EXAMPLES = {
    "Model": "finetune --model ~/Llama-3-8B --data chats.jsonl\n"
    "finetune --model gpt3-13b --steps 5 --no-save       # a preset: measures throughput on random tokens",
    "Data": "finetune --model ~/Llama-3-8B --data books/ notes.txt --seq-len 4096 --eval-data held-out.jsonl",
    "Memory": "finetune --gpu 4090 --ssd /mnt/nvme* --model gpt3-175b --host-memory 200GiB",
    "Cluster": "finetune --nodes 4 --rdzv-endpoint node0:29400 --model /shared/Llama-3-8B --data chats.jsonl\n"
    "srun --nodes 4 --ntasks-per-node 1 finetune --nodes 4 --model /shared/Llama-3-8B --data chats.jsonl\n"
    "finetune --nodes 1 --gpus-per-node 2 --model ~/Llama-3-8B --data chats.jsonl\n"
    "finetune --nodes 4 --rdzv-endpoint node0:29400 --ssd /mnt/nvme* --model /shared/Llama-65B   # out of core",
    "Training": "finetune --model ~/Llama-3-8B --data chats.jsonl --lr 2e-5 --warmup 3% --max-grad-norm 1",
    "Objective": "finetune --model ~/Llama-3-8B --data pairs.jsonl --objective dpo --beta 0.1 --lora-rank 16",
    "Adapters": "finetune --model ~/Llama-3-70B --data chats.jsonl --lora-rank 16 --lr 2e-4",
    "Output": "finetune --model ~/Llama-3-8B --data chats.jsonl --output tuned --log-to tensorboard\n"
    "finetune --config tuned/run/config.toml --resume",
    "Planning": "finetune --plan --gpu 4090 --drive p5510 --ssds 12 --host-memory 768GiB --model gpt3-13b\n"
    "finetune --check --ssd /mnt/nvme*",
    "Other": "finetune --config run.toml --lr 2e-5              # the command line wins over the file",
}
"""Command lines for each heading of the help."""


def _show_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    try:
        click.echo(f"finetune {version('fuyou')}")
    except PackageNotFoundError:
        click.echo("finetune (not installed: run from its source)")
    ctx.exit()


CALLBACKS: dict[str, Callable[..., Any]] = {
    "config": load_config_file,
    "version": _show_version,
}
"""Callbacks of options that act at once, while the command line is read."""


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
        try:
            rest = super().parse_args(ctx, repeat_option(with_resume_auto(args), names))
        except click.NoSuchOption as error:
            instead = instead_of(error.option_name)
            if instead is None:
                raise
            raise click.UsageError(instead, ctx) from None
        by_name = {option.name: option for option in self.options}
        for option in self.options:
            other = option.declaration.excludes
            if other is None or ctx.get_parameter_source(option.name or "") is not ParameterSource.COMMANDLINE:
                continue
            if ctx.get_parameter_source(other) is ParameterSource.DEFAULT_MAP:
                ctx.meta[WRITTEN].pop(other, None)  # which is not there if its value was the default
                ctx.params[other] = by_name[other].plain_default
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write every heading with its options and an example or two."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for option in self.options:
            record = option.get_help_record(ctx)
            if record is not None:
                groups.setdefault(option.group, []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records, col_max=28)
                if heading in EXAMPLES:
                    formatter.write_paragraph()
                    formatter.write("".join(f"  $ {line}\n" for line in EXAMPLES[heading].splitlines()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete options; a word that is none belongs to the option of several words before it, and is a path."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [CompletionItem(incomplete, type="file")]

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        option = super().get_help_option(ctx)
        return option and GroupedOption(
            ["-h", "--help"],
            group="Other",
            is_flag=True,
            is_eager=True,
            expose_value=False,
            help=option.help,
            callback=option.callback,
        )


def with_resume_auto(args: Sequence[str]) -> list[str]:
    """Turn ``--resume auto`` into the flag that means it: click's flags take no word."""
    result: list[str] = []
    for word in args:
        if word == "--resume=auto" or (word == "auto" and result[-1:] == ["--resume"]):
            result[-1:] = ["--resume-auto"] if word == "auto" else [*result[-1:], "--resume-auto"]
        else:
            result.append(word)
    return result


def repeat_option(args: Sequence[str], names: set[str]) -> list[str]:
    """Turn ``--ssd a b`` into ``--ssd=a --ssd=b`` for the options in ``names``; all else stays.

    A word that begins with a dash is an option; a file of such a name is given as ``./-name``.

    Raises:
        click.BadOptionUsage: no word follows.
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
        if not values:
            raise click.BadOptionUsage(name, f"Option {name!r} requires an argument.")
        result += [f"{name}={value}" for value in values]
    return result


def build_command(run: Callable[..., int]) -> GroupedCommand:
    """Make the command: it parses, then calls ``run`` with one keyword argument per option."""
    options = [
        GroupedOption.of_field(heading, field, help_texts[field.name], CALLBACKS.get(field.name))
        for heading, group in GROUPS.items()
        for help_texts in [attribute_docstrings(group)]
        for field in option_fields(group)
    ]
    return GroupedCommand(
        "finetune",
        params=[*options],
        callback=run,
        help="Fine-tune a Hugging Face model that is larger than memory: parameters and optimizer states live on SSD.",
        context_settings={"max_content_width": 110, "help_option_names": ["-h", "--help"]},
    )


def parse_command_line(arguments: Iterable[str], defaults: Mapping[str, Any] | None = None) -> click.Context:
    """Return the context of a command line, without running anything.

    Args:
        arguments: of ``finetune``.
        defaults: values of options that are neither in ``arguments`` nor in a file that they name, by name.
    """
    command = build_command(lambda **options: 0)
    return command.make_context("finetune", list(arguments), default_map=dict(defaults or {}))
