"""The entry point: reads the command line, runs it, and turns whatever happens into one message and an exit status.

0: done. 1: something failed. 2: what was asked for cannot be done as asked. 130: stopped by Ctrl-C, 143 by SIGTERM,
129 by SIGHUP: schedulers see that the run is not done, and the last line says how to go on.
"""

import contextlib
import gc
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import click
from click.core import ParameterSource

from cli.options.command import GroupedCommand, build_command
from cli.options.modes import mode_of, refuse_unread
from cli.options.option import WRITTEN, GroupedOption, Mode
from cli.options.settings import Settings
from cli.report.heartbeat import Heartbeat
from cli.train.interrupts import Interrupts, Stopped
from common.activity import activity
from common.errors import FinetuneError, UserError, on_one_line
from common.hub import stay_offline


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``finetune``.

    Args:
        argv: the command line; None: the process's own.

    Returns:
        The exit status.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    interrupts = Interrupts(ends_process=argv is None)
    named_flags, FinetuneError.names_flags = FinetuneError.names_flags, True

    def run(**options: Any) -> int:
        nonlocal debug
        debug = options["debug"]  # a file may say so, too
        return _run(interrupts, tuple(arguments), **options)

    try:
        with Heartbeat(), interrupts:
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
    finally:
        FinetuneError.names_flags = named_flags
        if argv is None:
            gc.freeze()  # the interpreter's last search for garbage takes a second, and the process ends anyway


def _run(interrupts: Interrupts, arguments: tuple[str, ...], **options: Any) -> int:
    context = click.get_current_context()
    mode = mode_of(options)
    given = _given_options(context)
    refuse_unread(mode, given)
    _check_model(mode, options)
    settings = Settings.of_options(options, arguments)
    stay_offline(settings.download, settings.push_to_hub is not None)
    if mode is Mode.VERIFY:
        with activity("comparing what is on the drives with its checksums", announced=True):
            from cli.inspect.verify import run_verify

            return run_verify(list(settings.verify))
    if mode is Mode.CHECK:
        with activity("looking at this machine, and measuring its drives", announced=True):
            from cli.inspect.check import run_check

            run_check(settings)
    elif mode is Mode.DEMO:
        from cli.train.demo import run_demo

        run_demo(settings.output, settings.report, settings.debug, interrupts)
    elif mode is Mode.PLAN_CLUSTER:
        from cli.plan.cluster import plan_cluster

        batch_is_given = any(option.name == "batch_size" for option in given)
        with activity("planning", announced=True):
            return plan_cluster(settings, settings.batch_size if batch_is_given else None)
    elif mode in Mode.PLAN:
        with activity("planning: steps of this run are simulated", announced=True):
            from cli.plan.out_of_core import run_plan

            return run_plan(settings)
    elif settings.nodes is not None:
        _launch(settings, trains=mode is Mode.TRAIN)
    elif mode is Mode.PROFILE:
        with activity("measuring this machine with the model", announced=True):
            from cli.inspect.profile import run_profile

            run_profile(settings)
    else:
        _train(settings, interrupts)
    return 0


def _launch(settings: Settings, trains: bool) -> None:
    """Run on several nodes or ranks."""
    from cli.job.resumed import decided
    from cli.launch.launcher import launch

    if settings.show_data is not None:
        raise UserError("--show-data needs no nodes: leave --nodes out.")
    launch(decided(settings), trains=trains)


def _train(settings: Settings, interrupts: Interrupts) -> None:
    """Train on this machine, in one process, or show what that would be trained on."""
    with activity("loading PyTorch and transformers", announced=True), _no_collection():
        from cli.job.resumed import decided
        from cli.train.one_machine import finetune

        settings = decided(settings)
    if settings.show_data is not None:
        from cli.inspect.show_data import show_data

        show_data(settings)
    else:
        finetune(settings, interrupts)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Import large libraries without looking for garbage, of which they make none: that takes a seventh of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _check_model(mode: Mode, options: dict[str, Any]) -> None:
    """Refuse a command line that lacks a model, or has one where it is looked for."""
    if mode in Mode.PLAN and options["max_model"] == bool(options["model"]):
        if options["max_model"]:
            raise UserError("--max-model looks for the model itself: leave --model out.")
        largest = "" if mode is Mode.PLAN_CLUSTER else ", or ask for the largest with --max-model"
        raise UserError(f"Give the model to plan for, --model DIR or --model PRESET{largest}.")
    if mode is Mode.TRAIN and options["model"] is None:
        raise UserError("Give the model to fine-tune with --model DIR or --model PRESET, or try --demo.")


def _given_options(context: click.Context) -> list[GroupedOption]:
    """Return the options that are on the command line, be it with their defaults, or in a file with other values.

    The file that a run writes has all options.
    """
    assert isinstance(context.command, GroupedCommand)
    options = {option.name: option for option in context.command.options}
    given = []
    for name in context.params:
        source = context.get_parameter_source(name)
        is_default = source is ParameterSource.DEFAULT_MAP and (
            str(context.meta[WRITTEN].get(name, options[name].plain_default)) == str(options[name].plain_default)
        )
        if source is not ParameterSource.DEFAULT and not is_default:
            given.append(options[name])
    return given


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
    return on_one_line(error).removesuffix(".") or "no message"


if __name__ == "__main__":
    sys.exit(main())
