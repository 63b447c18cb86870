"""The entry point: reads the command line, runs it, and turns whatever happens into one message and an exit status.

0: done. 1: something failed. 2: what was asked for cannot be done as asked. 130: stopped by Ctrl-C.
SIGTERM ends a run with 0, since the run is in order; SIGHUP with 129.
"""

import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import click
from click.core import ParameterSource

from cli.job.from_options import settings_of
from cli.options.command import build_command
from cli.options.config_file import effective_config
from cli.options.grouped import WRITTEN, expand_pattern
from cli.options.modes import CHECK, DEMO, PLAN_CLUSTER, PROFILE, VERIFY, mode_of
from cli.train.interrupts import Interrupts, Stopped
from common.errors import FinetuneError, UserError

DEFAULT_PROFILE_MODEL = "gpt3-1.3b"
"""Model of --profile without --model: a block large enough to show what a device can do, and quick on a CPU."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``finetune``.

    Args:
        argv: the command line; None: the process's own.

    Returns:
        The exit status.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    # Nothing is ever downloaded: checkpoints, tokenizers and data are local.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    interrupts = Interrupts()

    def run(**options: Any) -> int:
        nonlocal debug
        debug = options["debug"]  # a file may say so, too
        return _run(interrupts, tuple(arguments), **options)

    try:
        with interrupts:
            status = build_command(run).main(arguments, prog_name="finetune", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except click.ClickException as error:
        return _fail(f"{error.format_message()} (finetune --help lists all options)", 2)
    except Stopped as stopped:
        _say(f"\n{stopped}")
        return interrupts.status(stopped)
    except (KeyboardInterrupt, click.Abort):
        _say("\nstopped before training began.")
        return interrupts.status()
    except FinetuneError as error:
        return _fail(" ".join([str(error), *getattr(error, "__notes__", [])]), error.exit_status, debug)
    except Exception as error:
        notes = [] if debug else ["Run again with --debug for the traceback."]
        notes += getattr(error, "__notes__", [])
        return _fail(" ".join([f"{type(error).__name__}: {_one_line(error)}.", *notes]), 1, debug)


def _run(interrupts: Interrupts, arguments: tuple[str, ...], **options: Any) -> int:
    if options["write_config"]:
        print(effective_config(click.get_current_context()), end="")
        return 0
    mode = mode_of(options)
    mode.check(options, _typed)
    if mode is VERIFY:
        from cli.inspect.verify import run_verify

        return run_verify([path for word in options["verify"] for path in expand_pattern("--verify", word)])
    if mode is CHECK:
        from cli.inspect.check import run_check

        run_check(settings_of(arguments, {**options, "model": options["model"] or ""}))
        return 0
    if mode is DEMO:
        from cli.train.demo import run_demo

        run_demo(options["output"], options["report"], options["debug"], interrupts)
        return 0
    if options["plan"]:
        return _plan_cluster(options) if mode is PLAN_CLUSTER else _plan(arguments, options)
    if options["profile"]:
        options["model"] = options["model"] or DEFAULT_PROFILE_MODEL
    if options["model"] is None:
        raise UserError("Give the model to fine-tune with --model DIR or --model PRESET, or try --demo.")
    settings = settings_of(arguments, options)
    if settings.nodes is not None:
        from cli.launch.launcher import launch

        launch(settings, trains=not options["profile"])
    elif mode is PROFILE:
        from cli.inspect.profile import run_profile

        run_profile(settings)
    else:
        from cli.train.one_machine import finetune

        finetune(settings, interrupts)
    return 0


def _plan(arguments: tuple[str, ...], options: dict[str, Any]) -> int:
    """Plan for the machine at hand, or for one machine or several of a kind that are named with their drives."""
    if options["max_model"] == bool(options["model"]):
        raise UserError(
            "--max-model looks for the model itself: leave --model out."
            if options["max_model"]
            else "Give the model to plan for, --model DIR or --model PRESET, or ask for the largest with --max-model."
        )
    from cli.plan.out_of_core import PlanOptions, run_plan

    single = settings_of(arguments, {**options, "nodes": None, "gpus_per_node": None})
    return run_plan(single, PlanOptions(**{field.name: options[field.name] for field in fields(PlanOptions)}))


def _plan_cluster(options: dict[str, Any]) -> int:
    if options["model"] is None:
        raise UserError("Give the model to plan for, --model DIR or --model PRESET.")
    from cli.plan.cluster import ClusterSettings, plan_cluster

    shared = {field.name: options[field.name] for field in fields(ClusterSettings) if field.name in options}
    batch = options["batch_size"] if _typed("batch_size") else None
    return plan_cluster(ClusterSettings(**{**shared, "batch_size": batch, "as_json": options["json"]}))


def _typed(name: str) -> bool:
    """Return whether an option was given: on the command line, or in a file with a value other than its default.

    Files that ``--write-config`` made have all options.
    """
    context = click.get_current_context()
    source = context.get_parameter_source(name)
    if source is not ParameterSource.DEFAULT_MAP:
        return source is not ParameterSource.DEFAULT
    default = next(option.to_info_dict()["default"] for option in context.command.params if option.name == name)
    return str(context.meta[WRITTEN][name]) != str(default)


def _say(message: str) -> None:
    """Print a message for people; their terminal may be gone."""
    with contextlib.suppress(OSError):
        print(message, file=sys.stderr, flush=True)


def _fail(message: str, status: int, debug: bool = False) -> int:
    """Print one message, after the traceback with ``debug``, and return the exit status."""
    if debug:
        traceback.print_exc()
    _say(f"finetune: error: {message}")
    return status


def _one_line(error: BaseException) -> str:
    """Return an exception's text on one line, without its last full stop."""
    return " ".join(str(error).split()).removesuffix(".") or "no message"


if __name__ == "__main__":
    sys.exit(main())
