"""The options of what a run writes; like those in :mod:`cli.options.all_options`, each is declared here alone."""

from dataclasses import dataclass
from pathlib import Path

from cli.options.option import POSITIVE, Mode, Only, option


@dataclass(frozen=True, kw_only=True)
class OutputSettings:
    """What a run writes, and what it does with an earlier run."""

    output: Path | None = option(None, "DIR", modes=Mode.PLACE | Mode.DEMO | Mode.PROFILE_NODES)
    """Directory for the checkpoint and everything else the run writes. Default: finetune-output/<model>."""
    save: bool = option(True, modes=Mode.RUN)
    """Write no checkpoint at the end."""
    save_every: int | None = option(None, "N", POSITIVE, modes=Mode.RUN)
    """Steps between checkpoints in <output>/checkpoints/step-N; with evaluations, checkpoints/best is the best."""
    keep: int = option(2, "K", POSITIVE, modes=Mode.RUN)
    """How many checkpoints of --save-every to keep."""
    push_to_hub: str | None = option(None, "OWNER/NAME", excludes="save", modes=Mode.RUN)
    """Push the result to this repository of the Hugging Face hub; a new one is private. Needs a token (hf auth
    login)."""
    export: bool = option(False, excludes="save", of_call=True)
    """With --resume: take no step, and write the checkpoint of the last committed step."""
    resume: bool = option(False, modes=Mode.TRAIN | Mode.PLAN_HERE, excludes="overwrite", of_call=True, may_differ=True)
    """Continue from the last committed step. --resume auto starts a run if there is none."""
    resume_auto: bool = option(False, excludes="overwrite", of_call=True, may_differ=True)
    """The same as --resume auto, for a file."""
    overwrite: bool = option(False, modes=Mode.TRAIN | Mode.DEMO, excludes="resume", of_call=True, may_differ=True)
    """Replace the run that is in --output and --ssd."""
    commit_every: int | None = option(None, "N", POSITIVE, modes=Mode.STEP)
    """Steps between commits: a crash loses at most this many steps. Default: 1; 100 with --nodes in memory."""
    sample: str | None = option(None, "PROMPT", only=Only.ONE_MACHINE, excludes="save", modes=Mode.RUN)
    """After training, load the saved result and print its answer to this prompt (likeliest tokens). A tokenizer with a
    chat template gets it as a user's message."""
    sample_tokens: int = option(32, "N", POSITIVE, only=Only.SAMPLE, modes=Mode.RUN)
    """Most tokens to generate."""
    report: Path | None = option(None, "FILE", modes=Mode.TRAIN | Mode.DEMO, of_call=True, may_differ=True)
    """Write the summary to this file, as JSON."""
    log_every: int = option(1, "N", POSITIVE, modes=Mode.RUN)
    """Print a line every N steps where the output is not a terminal."""
    log_to: tuple[str, ...] = option(
        (), "NAME...", ("tensorboard", "wandb", "trackio", "mlflow", "jsonl"), modes=Mode.RUN, may_differ=True
    )
    """Send every step's figures to tensorboard, wandb, trackio, or mlflow; <output>/run/metrics.jsonl always has
    them."""
