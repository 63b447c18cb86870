"""The options of ``finetune``, in the groups that ``--help`` shows them in. Imports nothing slow."""

import glob
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click

from cli.schedule import SCHEDULES, Warmup
from common.errors import UserError
from common.units import parse_bytes

EXAMPLES = """\
Model     finetune --model ~/Llama-3-8B --data chats.jsonl
          finetune --model gpt3-13b --steps 5 --no-save       measures throughput on random tokens
Data      finetune --model ~/Llama-3-8B --data books/ notes.txt --seq-len 4096 --epochs 2
Memory    finetune --gpu 4090 --ssd /mnt/nvme* --model gpt3-175b --host-memory 200GiB
Plan      finetune --plan --gpu 4090 --drive p5510 --ssds 12 --host-memory 768GiB --model gpt3-13b --batch-size 64
Training  finetune --model ~/Llama-3-8B --data chats.jsonl --lr 2e-5 --warmup 3% --max-grad-norm 1
Adapters  finetune --model ~/Llama-3-70B --data chats.jsonl --lora-rank 16 --lr 2e-4
Output    finetune --model ~/Llama-3-8B --data chats.jsonl --output tuned --resume
Nodes     finetune --nodes 4 --rdzv-endpoint node0:29400 --model /shared/Llama-3-8B --data chats.jsonl    on each node
          srun --nodes 4 --ntasks-per-node 1 finetune --nodes 4 --model /shared/Llama-3-8B --data chats.jsonl
          finetune --nodes 1 --gpus-per-node 2 --model ~/Llama-3-8B --data chats.jsonl
"""


class GroupedOption(click.Option):
    """An option that knows its heading; with ``words``, it takes all words up to the next option."""

    def __init__(self, *args: Any, group: str, words: bool = False, **kwargs: Any) -> None:
        kwargs["multiple"] = words
        super().__init__(*args, **kwargs)
        self.group = group
        self.words = words

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Defaults are shown; ranges such as ``x>=1`` are said only to those who leave them."""
        extra = super().get_help_extra(ctx)
        extra.pop("range", None)
        return extra


class GroupedCommand(click.Command):
    """A command whose help has headings, and some of whose options take several words.

    click has options with a fixed number of values only. Shells expand ``--ssd /mnt/nvme*`` into one ``--ssd`` and
    several words: the option is repeated before each of them, and click sees what it knows.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        names = {name for option in self._grouped() if option.words for name in option.opts}
        return super().parse_args(ctx, repeat_option(args, names))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for option in self._grouped():
            record = option.get_help_record(ctx)
            if record is not None:
                groups.setdefault(option.group, []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records, col_max=28)
        with formatter.section("Examples"):
            for line in EXAMPLES.splitlines():
                formatter.write(f"  {line}\n")

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        found = super().get_help_option(ctx)
        return (
            found
            and GroupedOption(
                ["--help"], group="Other", is_flag=True, is_eager=True, expose_value=False, help=found.help,
                callback=found.callback,
            )
        )  # fmt: skip

    def _grouped(self) -> list[GroupedOption]:
        return [option for option in self.params if isinstance(option, GroupedOption)]


def repeat_option(args: Sequence[str], names: set[str]) -> list[str]:
    """``--ssd a b`` becomes ``--ssd=a --ssd=b`` for the options in ``names``; all else stays.

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


def expand_pattern(option: str, name: str) -> list[str]:
    """What a quoted pattern stands for, sorted; a name without pattern signs, or that exists as it is, is itself.

    Raises:
        UserError: nothing matches.
    """
    path = str(Path(name).expanduser())
    if Path(path).exists() or not glob.has_magic(path):
        return [name]
    found = sorted(glob.glob(path, recursive=True))
    if not found:
        raise UserError(f"{option} {name}: nothing matches this pattern.")
    return found


class _Checked(click.ParamType):
    """A value read by one of our own functions, whose UserError becomes click's."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except UserError as error:
            self.fail(str(error), param, ctx)


def _memory(text: str) -> int:
    """A budget in which something must fit."""
    nbytes = parse_bytes(text)
    if nbytes <= 0:
        raise UserError(f"{text!r}: a budget must be more than 0 bytes. Leave the option out to use what there is.")
    return nbytes


def _show_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    try:
        click.echo(f"finetune {version('fuyou')}")
    except PackageNotFoundError:
        click.echo("finetune (not installed: run from its source)")
    ctx.exit()


def build_command(run: Callable[..., int]) -> click.Command:
    """The command: parses, then calls ``run`` with one keyword argument per option."""
    size = _Checked("size", _memory)
    positive = click.IntRange(min=1)
    rate = click.FloatRange(min=0)
    decay = click.FloatRange(min=0, max=1, max_open=True)
    folder = click.Path(path_type=Path)
    options: list[GroupedOption] = []

    def group(heading: str) -> Callable[..., None]:
        def add(*names: str, **kwargs: Any) -> None:
            options.append(GroupedOption([*names], group=heading, **kwargs))

        return add

    add = group("Model")
    add("--model", metavar="DIR|PRESET", help="Checkpoint directory, or the name of a preset (random weights).")
    add("--demo", is_flag=True, help="Make a small checkpoint and fine-tune it: no network, no GPU, two minutes.")

    add = group("Data")
    add(
        "--data",
        metavar="FILE...",
        words=True,
        help="Files (.jsonl .json .csv .parquet .txt), directories or quoted patterns. Default: random tokens.",
    )
    add(
        "--seq-len",
        type=click.IntRange(min=2),
        metavar="N",
        help="Tokens per sequence. Default: 1024, or the model's context if that is shorter.",
    )
    add("--batch-size", type=positive, default=8, show_default=True, metavar="N", help="Sequences per step.")

    add = group("Memory")
    add(
        "--ssd",
        metavar="DIR...",
        words=True,
        help="Directories for parameters and optimizer states, one per drive. Default: inside --output.",
    )
    add(
        "--gpu",
        default="auto",
        show_default=True,
        metavar="auto|cpu|NAME|INDEX",
        help="What computes. (emulated:tflops=165,memory=24GiB,link=25GB/s computes nothing and times the rest.)",
    )
    add("--device-memory", type=size, metavar="SIZE", help="Device memory to use: 24GiB. Default: what is free.")
    add("--host-memory", type=size, metavar="SIZE", help="Host memory to use: 64GiB. Default: what is free.")
    add(
        "--host-cache",
        type=_Checked("size", parse_bytes),
        metavar="SIZE",
        help="Host memory (of each node) to keep parameters and states in between steps; 0: none. Default: the rest.",
    )
    add("--micro-batch", type=positive, metavar="N", help="Sequences computed at once. Default: as many as fit.")
    add(
        "--dtype",
        type=click.Choice(["bf16", "fp32"]),
        default="bf16",
        show_default=True,
        help="What blocks compute in. Master weights are fp32 either way.",
    )
    add(
        "--optimizer-dtype",
        type=click.Choice(["fp32", "bf16"]),
        default="fp32",
        show_default=True,
        help="Of Adam's two moments; bf16 is rounded stochastically.",
    )
    add(
        "--io",
        type=click.Choice(["auto", "kvikio", "posix"]),
        default="auto",
        show_default=True,
        help="How SSDs are read and written.",
    )
    add("--single-slot", is_flag=True, help="Half the space on SSD, but a crash loses the run.")

    add = group("Cluster")
    add(
        "--nodes",
        type=positive,
        metavar="N",
        help="Train on N machines together, the model sharded over all GPUs in memory. Start the same line on each.",
    )
    add("--gpus-per-node", type=positive, metavar="M", help="Ranks per machine. Default: its GPUs; 1 with --gpu cpu.")
    add(
        "--rdzv-endpoint",
        metavar="HOST:PORT",
        help="Where nodes meet: one of them, and a free port there. Default: as srun or MASTER_ADDR say.",
    )
    add(
        "--node-timeout",
        type=positive,
        default=300,
        show_default=True,
        metavar="SECONDS",
        help="How long to wait for a node that does not come or no longer answers.",
    )
    add(
        "--max-restarts",
        type=click.IntRange(min=0),
        default=3,
        show_default=True,
        metavar="N",
        help="How often to start again from the last commit after a rank is lost.",
    )
    add(
        "--strategy",
        metavar="NAME|P/G/OS",
        help="fcdp: parameters cached in host memory; zero3: plain FSDP2; hybrid: FSDP2 inside nodes. Default: fcdp. "
        "--plan knows more, IGG and 4x1/4x1/8x1 too, and finds the best.",
    )
    add(
        "--device-cache-threshold",
        type=click.FloatRange(min=0, max=1),
        metavar="X",
        help="Part of device memory up to which cached parameters stay there. Default: 0.9.",
    )

    add = group("Training")
    add("--steps", type=positive, metavar="N", help="Default: one epoch with --data, 10 steps without.")
    add("--epochs", type=click.FloatRange(min=0, min_open=True), metavar="N", help="Passes over the data.")
    add("--lr", metavar="X", type=rate, default=1e-5, show_default=True, help="Highest learning rate.")
    add(
        "--warmup",
        type=_Checked("warmup", Warmup.parse),
        default="0",
        show_default=True,
        metavar="N|FRACTION",
        help="Steps, or part of all steps (0.03 or 3%), in which the learning rate rises.",
    )
    add(
        "--schedule",
        type=click.Choice(SCHEDULES),
        default="cosine",
        show_default=True,
        help="How the learning rate falls afterwards.",
    )
    add("--weight-decay", metavar="X", type=rate, default=0.01, show_default=True, help="Not for biases and norms.")
    add("--beta1", metavar="X", type=decay, default=0.9, show_default=True, help="Decay of Adam's mean.")
    add("--beta2", metavar="X", type=decay, default=0.999, show_default=True, help="Decay of Adam's variance.")
    add(
        "--eps",
        metavar="X",
        type=click.FloatRange(min=0, min_open=True),
        default=1e-8,
        show_default=True,
        help="Added to Adam's divisor.",
    )
    add(
        "--max-grad-norm",
        metavar="X",
        type=rate,
        default=0.0,
        show_default=True,
        help="Scale gradients down to this global norm. 0: never.",
    )
    add(
        "--seed",
        metavar="N",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="Of the data's order, and of random weights and tokens.",
    )

    add = group("Adapters")
    add("--lora-rank", type=positive, metavar="R", help="Train LoRA adapters of this rank, and freeze the weights.")
    add(
        "--lora-alpha",
        type=click.FloatRange(min=0, min_open=True),
        metavar="X",
        help="An adapter's output is multiplied by this over the rank. Default: twice the rank.",
    )
    add(
        "--lora-dropout",
        type=decay,
        default=0.0,
        show_default=True,
        metavar="X",
        help="Part of the adapters' inputs to drop in training.",
    )
    add(
        "--lora-targets",
        metavar="NAME...",
        words=True,
        help="Modules to adapt: q_proj v_proj. Default: every linear layer but the head.",
    )
    add(
        "--peft-config",
        type=folder,
        metavar="FILE",
        help="An adapter_config.json of the peft library instead (or its directory): rsLoRA, DoRA, LoHa, LoKr, IA3.",
    )
    add("--merge", is_flag=True, help="Write the model with the adapters merged into it, beside the adapters.")

    add = group("Output")
    add("--output", type=folder, metavar="DIR", help="Default: finetune-output/<model>.")
    add("--no-save", "save", is_flag=True, flag_value=False, default=True, help="Write no checkpoint at the end.")
    add("--resume", is_flag=True, help="Continue from the last committed step.")
    add("--overwrite", is_flag=True, help="Replace the run that is in --output and --ssd.")
    add(
        "--commit-every",
        type=positive,
        metavar="N",
        help="Steps between commits: a crash loses at most so many. Default: 1; 100 with --nodes.",
    )
    add("--report", type=folder, metavar="FILE", help="Write the summary there, as JSON.")

    add = group("Planning")
    add("--plan", is_flag=True, help="Train nothing: say whether it fits, how fast it will be, and what bounds it.")
    add("--drive", metavar="NAME", help="Plan for drives of this kind, and for the kind of GPU that --gpu names.")
    add("--ssds", type=positive, metavar="N", help="Plan for so many of them.  [default: 1]")
    add(
        "--scheme",
        type=click.Choice(["ours", "fuyou"]),
        default="ours",
        show_default=True,
        help="Plan what this program does, or what the paper's Fuyou did.",
    )
    add("--max-model", is_flag=True, help="Plan the largest preset that fits.")
    add("--cluster", metavar="PRESET|FILE", help="Plan for a cluster: a preset, or a profile's file.")
    add("--levels", metavar="N,N,...", help="Its ranks by level, fastest first: 2,4,16 is 16 nodes of 4 pairs.")
    add(
        "--trainable",
        type=click.FloatRange(min=0, min_open=True, max=1),
        metavar="X",
        help="Part of the parameters to plan as trainable on a cluster: about 0.01 with LoRA. Default: 1.",
    )
    add("--quantise", is_flag=True, help="Let the plan for a cluster choose strategies that send fewer bits.")
    add("--json", is_flag=True, help="Print the plan as JSON.")
    add(
        "--profile",
        is_flag=True,
        help="Measure this machine with the model (default: gpt3-1.3b) instead of training: a dozen seconds, a table.",
    )
    add(
        "--trace",
        type=folder,
        metavar="FILE",
        help="Write the last (or the planned) step's tasks there, for ui.perfetto.dev.",
    )

    add = group("Other")
    add("--debug", is_flag=True, help="Show where an error came from.")
    add("--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the version.")

    return GroupedCommand(
        "finetune",
        params=list(options),
        callback=run,
        help="Fine-tune a Hugging Face model that is larger than memory: parameters and optimizer states live on SSD.",
        context_settings={"max_content_width": 110, "help_option_names": ["--help"]},
    )
