"""The options of ``finetune``, in the groups that ``--help`` shows them in. Imports nothing slow."""

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class

from cli.options.config_file import load_config_file
from cli.options.grouped import FiniteFloat, GroupedCommand, GroupedOption, ParsedValue
from cli.options.schedule import SCHEDULES, Warmup
from cli.options.settings import CLIP_BY, ROUTER_LOSS, TRACKERS, TRAIN_VISION
from common.errors import UserError
from common.presets import preset_files
from common.units import parse_bytes

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
    "Adapters": "finetune --model ~/Llama-3-70B --data chats.jsonl --lora-rank 16 --lr 2e-4",
    "Output": "finetune --model ~/Llama-3-8B --data chats.jsonl --output tuned --log-to tensorboard\n"
    "finetune --config tuned/run/config.toml --resume",
    "Planning": "finetune --plan --gpu 4090 --drive p5510 --ssds 12 --host-memory 768GiB --model gpt3-13b\n"
    "finetune --check --ssd /mnt/nvme*",
    "Other": "finetune --config run.toml --lr 2e-5              # the command line wins over the file\n"
    "finetune --model ~/Llama-3-8B --epochs 2 --write-config > run.toml",
}
"""Command lines for each heading of the help."""

EXCLUSIVE = (("steps", "epochs"), ("resume", "overwrite"))
"""Options of which a run has at most one."""


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


def _show_completion(ctx: click.Context, param: click.Parameter, shell: str | None) -> None:
    if shell is None or ctx.resilient_parsing:
        return
    script = get_completion_class(shell)
    assert script is not None
    click.echo(script(ctx.command, {}, "finetune", "_FINETUNE_COMPLETE").source())
    ctx.exit()


def _preset_names(kind: str) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Completes names of presets, and folders where one may stand instead."""

    def complete(ctx: click.Context, param: click.Parameter, begun: str) -> list[CompletionItem]:
        names = [CompletionItem(name) for name in sorted(preset_files(kind)) if name.startswith(begun)]
        return names + ([CompletionItem(begun, type="file")] if kind in ("models", "clusters") else [])

    return complete


def build_command(run: Callable[..., int]) -> click.Command:
    """The command: parses, then calls ``run`` with one keyword argument per option."""
    size = ParsedValue("size", _memory)
    positive = click.IntRange(min=1)
    rate = FiniteFloat(min=0)
    decay = FiniteFloat(min=0, max=1, max_open=True)
    folder = click.Path(path_type=Path)
    options: list[GroupedOption] = []

    def group(heading: str) -> Callable[..., None]:
        def add(*names: str, **kwargs: Any) -> None:
            shown = "default" in kwargs and not kwargs.get("is_flag")
            options.append(GroupedOption([*names], group=heading, show_default=shown, **kwargs))

        return add

    add = group("Model")
    add(
        "--model",
        metavar="DIR|PRESET",
        shell_complete=_preset_names("models"),
        help="Checkpoint directory, or the name of a preset (random weights).",
    )
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
    add("--batch-size", type=positive, default=8, metavar="N", help="Sequences per step.")
    add(
        "--truncate/--drop-long",
        is_flag=True,
        default=True,
        help="Leave out conversations, and prompts with completions, that are longer than --seq-len. By default "
        "(--truncate) they are cut behind the last answer that fits, so that what is trained on keeps all that comes "
        "before it. Counted and said either way; plain texts go on in the next row.",
    )
    add(
        "--eval-data",
        metavar="FILE...",
        words=True,
        help="Held-out data: loss and perplexity on all of them before the first and after the last step.",
    )
    add("--eval-every", type=positive, metavar="N", help="Evaluate every N steps, too.")

    add = group("Memory")
    add(
        "--ssd",
        metavar="DIR...",
        words=True,
        help="Directories for parameters and optimizer states, one per drive. Default: inside --output.",
    )
    add(
        "--leave-ssd",
        metavar="DIR...",
        words=True,
        help="With --resume: drives that the run is on and that --ssd no longer names. Its records move to those of "
        "--ssd, as they do to drives that are new there.",
    )
    add(
        "--gpu",
        default="auto",
        metavar="auto|cpu|NAME|INDEX",
        shell_complete=_preset_names("gpus"),
        help="What computes. (emulated:tflops=165,memory=24GiB,link=25GB/s computes nothing and times the rest.)",
    )
    add("--device-memory", type=size, metavar="SIZE", help="Device memory to use: 24GiB. Default: what is free.")
    add("--host-memory", type=size, metavar="SIZE", help="Host memory to use: 64GiB. Default: what is free.")
    add(
        "--host-cache",
        type=ParsedValue("size", parse_bytes),
        metavar="SIZE",
        help="Host memory (of each node) to keep parameters and states in between steps; 0: none. Default: the rest.",
    )
    add("--micro-batch", type=positive, metavar="N", help="Sequences computed at once. Default: as many as fit.")
    add(
        "--dtype",
        type=click.Choice(["auto", "bf16", "fp32"]),
        default="auto",
        help="What blocks compute in; auto: what the device multiplies faster. Master weights are fp32 either way.",
    )
    add(
        "--optimizer-dtype",
        type=click.Choice(["fp32", "bf16"]),
        default="fp32",
        help="Of Adam's two moments; bf16 is rounded stochastically.",
    )
    add(
        "--train-vision",
        type=click.Choice(TRAIN_VISION),
        help="Of a vision-language model: train the projector, or all that turns images into tokens. Default: frozen.",
    )
    add("--io", type=click.Choice(["auto", "kvikio", "posix"]), default="auto", help="How SSDs are read and written.")
    add("--single-slot", is_flag=True, help="Half the space on SSD, but a crash loses the run.")
    add("--unproven", is_flag=True, help="Do not show first, on a small model, that streaming this family is exact.")

    add = group("Cluster")
    add(
        "--nodes",
        type=positive,
        metavar="N",
        help="Train on N machines together: sharded over all GPUs in memory, or out of core with --ssd. Start the same "
        "line on each.",
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
        metavar="SECONDS",
        help="How long to wait for a node that does not come or no longer answers.",
    )
    add(
        "--max-restarts",
        type=click.IntRange(min=0),
        default=3,
        metavar="N",
        help="How often to start again from the last commit after a rank is lost.",
    )
    add(
        "--strategy",
        metavar="NAME|P/G/OS",
        help="In memory, how parameters, gradients and optimizer states are sharded: fcdp (parameters cached in host "
        "memory), zero3, hybrid, zero2, paro-iig, ..., or their scopes, IGG or 4x1/4x1/8x1 (docs/strategies.md). auto: "
        "what the planner finds fastest on --cluster. Default: fcdp.",
    )
    add(
        "--device-cache-threshold",
        type=FiniteFloat(min=0, max=1),
        metavar="X",
        help="Part of device memory up to which cached parameters stay there. Default: 0.9.",
    )

    add = group("Training")
    add("--steps", type=positive, metavar="N", help="Default: one epoch with --data, 10 steps without.")
    add("--epochs", type=FiniteFloat(min=0, min_open=True), metavar="N", help="Passes over the data.")
    add("--lr", metavar="X", type=rate, default=1e-5, help="Highest learning rate.")
    add(
        "--warmup",
        type=ParsedValue("warmup", Warmup.parse),
        default="0",
        metavar="N|FRACTION",
        help="Steps, or part of all steps (0.03 or 3%), in which the learning rate rises.",
    )
    add("--schedule", type=click.Choice(SCHEDULES), default="cosine", help="How the learning rate falls afterwards.")
    add("--weight-decay", metavar="X", type=rate, default=0.01, help="Not for biases and norms.")
    add("--beta1", metavar="X", type=decay, default=0.9, help="Decay of Adam's mean.")
    add("--beta2", metavar="X", type=decay, default=0.999, help="Decay of Adam's variance.")
    add(
        "--eps",
        metavar="X",
        type=FiniteFloat(min=0, min_open=True),
        default=1e-8,
        help="Added to Adam's divisor.",
    )
    add(
        "--max-grad-norm",
        metavar="X",
        type=rate,
        default=0.0,
        help="Scale gradients down to this global norm. 0: never.",
    )
    add(
        "--on-nonfinite",
        type=click.Choice(["stop", "skip"]),
        default="stop",
        help="When loss or gradient of a step is NaN or infinite: stop, or skip the step (10 in a row at most). Where "
        "states are on SSD, skip costs as much as --max-grad-norm.",
    )
    add(
        "--router-loss",
        type=click.Choice(ROUTER_LOSS),
        default="auto",
        help="Add a mixture of experts' load-balancing loss, times the model's own coefficient. auto: if its "
        "configuration has output_router_logits on.",
    )
    add(
        "--clip-by",
        type=click.Choice(CLIP_BY),
        default="auto",
        help="Update when the norm is known, in the next step, or before and again if need be. Same numbers.",
    )
    add(
        "--seed",
        metavar="N",
        type=click.IntRange(min=0),
        default=0,
        help="Of the data's order, and of random weights and tokens.",
    )

    add = group("Adapters")
    add("--lora-rank", type=positive, metavar="R", help="Train LoRA adapters of this rank, and freeze the weights.")
    add(
        "--lora-alpha",
        type=FiniteFloat(min=0, min_open=True),
        metavar="X",
        help="An adapter's output is multiplied by this over the rank. Default: twice the rank.",
    )
    add(
        "--lora-dropout",
        type=decay,
        default=0.0,
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
    add(
        "--frozen-dtype",
        type=click.Choice(["checkpoint", "int8", "nf4", "plain"]),
        help="Keep the frozen weights on SSD in fewer bits: rounded once (int8, nf4), or in the bytes of a compressed "
        "checkpoint. They compute in --dtype. Default: checkpoint, if it is compressed; else plain, as --dtype.",
    )
    add("--merge", is_flag=True, help="Write the model with the adapters merged into it, beside the adapters.")

    add = group("Output")
    add("--output", type=folder, metavar="DIR", help="Default: finetune-output/<model>.")
    add("--save/--no-save", is_flag=True, default=True, help="Write no checkpoint at the end.")
    add("--allow-nonfinite", is_flag=True, help="Write the checkpoint even if it holds a NaN or an infinity.")
    add("--resume", is_flag=True, help="Continue from the last committed step.")
    add("--overwrite", is_flag=True, help="Replace the run that is in --output and --ssd.")
    add(
        "--commit-every",
        type=positive,
        metavar="N",
        help="Steps between commits: a crash loses at most so many. Default: 1; 100 with --nodes in memory.",
    )
    add("--sample", metavar="PROMPT", help="At the end, print how the tuned model goes on from there.")
    add("--sample-tokens", type=positive, default=32, metavar="N", help="How far at most.")
    add(
        "--temperature",
        type=rate,
        default=0.0,
        metavar="X",
        help="Of the --sample: 0 takes the likeliest word each time, 0.8 varies.",
    )
    add("--report", type=folder, metavar="FILE", help="Write the summary there, as JSON.")

    add(
        "--log-to",
        metavar="NAME...",
        words=True,
        type=click.Choice(TRACKERS),
        help="Send every step's figures to tensorboard, wandb, trackio, mlflow; <output>/run/metrics.jsonl has them "
        "always.",
    )

    add = group("Planning")
    add("--plan", is_flag=True, help="Train nothing: say whether it fits, how fast it will be, and what bounds it.")
    add(
        "--drive",
        metavar="NAME",
        shell_complete=_preset_names("drives"),
        help="Plan for drives of this kind, and for the kind of GPU that --gpu names.",
    )
    add("--ssds", type=positive, metavar="N", help="Plan for so many of them.  [default: 1]")
    add("--network", metavar="RATE", help="Plan for several nodes with SSDs: what each sends, 25Gbit/s.")
    add(
        "--scheme",
        type=click.Choice(["ours", "fuyou"]),
        default="ours",
        help="Plan what this program does, or what the paper's Fuyou did.",
    )
    add("--max-model", is_flag=True, help="Plan the largest preset that fits.")
    add(
        "--cluster",
        metavar="PRESET|FILE",
        shell_complete=_preset_names("clusters"),
        help="The hardware to plan for, or to choose a strategy for: a preset, or a profile's file.",
    )
    add("--levels", metavar="N,N,...", help="A cluster's ranks by level, fastest first: 2,4,16 is 16 nodes of 4 pairs.")
    add(
        "--trainable",
        type=FiniteFloat(min=0, min_open=True, max=1),
        metavar="X",
        help="Part of the parameters to plan as trainable on a cluster: about 0.01 with LoRA. Default: 1.",
    )
    add(
        "--quantise",
        is_flag=True,
        help="Let the plan for a cluster, or --strategy auto, choose strategies that send fewer bits.",
    )
    add("--json", is_flag=True, help="Print the plan as JSON.")
    add(
        "--verify",
        metavar="DIR...",
        words=True,
        help="Train nothing: is what runs have in DIR (as --ssd, or --output) what was written?",
    )
    add(
        "--profile",
        is_flag=True,
        help="Measure this machine with the model (default: gpt3-1.3b) instead of training: a dozen seconds, a table. "
        "With --nodes, measure the cluster, and write a file for --cluster.",
    )
    add(
        "--check",
        is_flag=True,
        help="Look at this machine and measure its drives (--ssd) instead of training: what a bug report needs, and "
        "what will hurt.",
    )
    add(
        "--trace",
        type=folder,
        metavar="FILE",
        help="Write the last (or the planned) step's tasks there, for ui.perfetto.dev.",
    )

    add = group("Other")
    add(
        "--config",
        type=folder,
        metavar="FILE",
        is_eager=True,
        callback=load_config_file,
        help="Take options from this TOML file, too; the command line wins.",
    )
    add("--write-config", is_flag=True, help="Print all options as they are now, as a file for --config, and stop.")
    add("--debug", is_flag=True, help="Show where an error came from.")
    add(
        "--completion",
        type=click.Choice(["bash", "zsh", "fish"]),
        is_eager=True,
        expose_value=False,
        callback=_show_completion,
        help='Print what makes a shell complete our options: put eval "$(finetune --completion bash)" in ~/.bashrc.',
    )
    add("--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the version.")

    return GroupedCommand(
        "finetune",
        params=list(options),
        examples=EXAMPLES,
        exclusive=EXCLUSIVE,
        callback=run,
        help="Fine-tune a Hugging Face model that is larger than memory: parameters and optimizer states live on SSD.",
        context_settings={"max_content_width": 110, "help_option_names": ["--help"]},
    )
