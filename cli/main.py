"""The entry point: reads the command line, runs it, and turns any outcome into one message and an exit status.

0: done. 1: something failed. 2: what was requested cannot be done as requested. 130: stopped by Ctrl-C, 143 by SIGTERM,
129 by SIGHUP: schedulers see that the run is not done, and the last line says how to continue.
"""

import contextlib
import errno
import gc
import importlib.util
import io
import os
import resource
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from cli.options.command import Finetune, parse_command_line
from cli.options.option import naming, split_weight
from cli.options.recipes import recipe_file, recipe_list
from cli.options.run_record import REPLACED, RUN, RunRecord
from cli.options.settings import RANDOM, Settings, output_directory, settings_of
from cli.report.progress import Heartbeat
from cli.train.process import STATUS, Interrupts, Outcome, RankProcess, Stopped, is_lost_contact, is_rank
from common.activity import activity
from common.errors import FinetuneError, UserError, as_message, on_one_line, with_notes
from common.files import check_data_file, check_output, check_path, nearest_path, preset_files
from common.hub import stay_offline
from common.models.names import check_model
from common.store.directories import usable_directories
from common.store.errors import advice_on
from common.units import counted, format_bytes
from fuyou.optimizer.process.start import started_early


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, the process's own if there is none, and return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        _open_closed_streams()
        # Or PyTorch's compiler starts a process for each processor, to decode weights by one kernel
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if argv is None and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names and data may not fit a terminal's encoding
        for name in ("write", "flush"):
            setattr(sys.stdout, name, _naming_output(getattr(sys.stdout, name)))
    rank = RankProcess() if argv is None and is_rank() else None
    named_flags = FinetuneError.names_flags
    FinetuneError.names_flags = True
    try:
        outcome = _outcome(arguments, rank, Interrupts(ends_process=argv is None))
    finally:
        FinetuneError.names_flags = named_flags
        if argv is None:
            # The interpreter's last search for garbage takes a second, and the process ends anyway
            gc.freeze()
    if rank is not None:
        rank.end(outcome)
    if outcome.message:
        with contextlib.suppress(OSError):  # the terminal may be gone
            start = "\n" if outcome.status in STATUS.values() else "finetune: error: "
            print(f"{start}{as_message(outcome.message)}", file=sys.stderr, flush=True)
    return outcome.status


def _outcome(arguments: list[str], rank: RankProcess | None, interrupts: Interrupts) -> Outcome:
    """Run a command line, as one of several ranks or alone, to its exit status and message."""
    debug = "--debug" in arguments
    trains = True

    def run(command: str, **options: Any) -> int:
        nonlocal debug, trains
        trains = command == "train"
        debug = options["debug"]  # a file may set it, too
        return _run(interrupts, rank, tuple(arguments), command)

    try:
        with contextlib.ExitStack() as stack:
            if rank is None or rank.is_rank0:
                stack.enter_context(Heartbeat())
            if rank is None:
                stack.enter_context(interrupts)
            elif rank.stopping:
                raise KeyboardInterrupt
            _check_encoding(arguments)
            if sys.flags.optimize > 1:
                raise UserError("transformers needs its docstrings: leave out -OO, or unset PYTHONOPTIMIZE.")
            status = Finetune(run).main(arguments, prog_name="finetune", standalone_mode=False)
        return Outcome(status if isinstance(status, int) else 0)
    except click.ClickException as error:
        return Outcome(2, f"{error.format_message()} (finetune --help lists all options)")
    except Stopped as stopped:
        return Outcome(interrupts.status(stopped), with_notes(str(stopped), stopped))
    except (KeyboardInterrupt, click.Abort) as error:
        return Outcome(
            interrupts.status(), with_notes(f"stopped{' before training began' if trains else ''}.", error)
        )
    except FinetuneError as error:
        if debug:
            traceback.print_exc()
        return Outcome(error.exit_status, with_notes(str(error), error))
    except Exception as error:
        if debug:
            traceback.print_exc()
        if _lacks_memory(error):
            return Outcome(1, _memory_advice(error))
        if rank is not None and is_lost_contact(error):
            rank.lose(error)
        if isinstance(error, ImportError):
            return Outcome(1, _import_advice(error))
        advice = "" if debug else " Run again with --debug for the traceback."
        if rank is not None and type(error).__name__ == "OutOfMemoryError":
            advice = (
                " A smaller --micro-batch, a lower --device-cache-threshold or more ranks take less memory."
            )
        text = on_one_line(error).removesuffix(".") or "no message"
        if isinstance(error, OSError) and error.filename is not None and advice_on(error):
            path = error.filename2 or error.filename  # of a copy, its target
            return Outcome(1, with_notes(f"{path}: {error.strerror}. {advice_on(error)}", error))
        return Outcome(1, with_notes(f"{type(error).__name__}: {text}.{advice}", error))


def _open_closed_streams() -> None:
    """Open /dev/null where a standard stream is closed: else a file of the run gets its number, and all output."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def _naming_output(write: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of standard output whose errors name it: click ends without a message at a closed pipe."""

    def named(*args: Any) -> Any:
        try:
            return write(*args)
        except OSError as error:
            raise FinetuneError(
                f"Standard output cannot be written ({error.strerror}): the drive of the log is full, or the program "
                "that reads it has ended."
            ) from error

    return named


def _check_encoding(arguments: Sequence[str]) -> None:
    """Refuse names that are no text: no file that describes the run could name them."""
    for word in (*arguments, os.getcwd()):
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            raise UserError(
                f"{word} is not UTF-8: give that file or directory another name (mv), and name it by that."
            )


# What errors of the system, of Python, of PyTorch, and of the dynamic linker say where memory is lacking.
_NO_MEMORY = (
    "cannot allocate memory",
    "can't allocate memory",
    "can't start new thread",
    "failed to map segment",
)


def _lacks_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in _NO_MEMORY)


# Packages that this program can do without, and that others import where they are installed.
_OPTIONAL = (
    "torchvision",
    "torchaudio",
    "flash_attn",
    "bitsandbytes",
    "triton",
    "kvikio",
    "xformers",
    "deepspeed",
)


def _import_advice(error: BaseException) -> str:
    """Return the deepest cause of an import error, and what to type if an optional package is broken."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    what = f"{type(error).__name__}: {on_one_line(error).removesuffix('.')}."
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        for name in _OPTIONAL:
            if name in Path(frame.filename).parts:
                pip = f"{shlex.quote(sys.executable)} -m pip"
                return (
                    f"{name} is installed and does not work ({what.removesuffix('.')}): install its version for the "
                    f"PyTorch that is here, or remove it with `{pip} uninstall {name.replace('_', '-')}`."
                )
    return what


def _memory_advice(error: Exception) -> str:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    advice = "--host-memory, --micro-batch and --seq-len say how much is needed."
    if limit != resource.RLIM_INFINITY:
        advice = (
            f"This shell allows {format_bytes(limit)} of address space: enter `ulimit -v unlimited` before."
        )
    what = on_one_line(error).removesuffix(".")
    return f"There is not enough memory{f' ({what})' if what else ''}. {advice}"


def _run(interrupts: Interrupts, rank: RankProcess | None, arguments: tuple[str, ...], command: str) -> int:
    context = click.get_current_context()
    if command == "recipe":
        name = context.params["recipe"]
        print(recipe_list() if name is None else recipe_file(name).read_text(), end="" if name else "\n")
        return 0
    if command == "export" and context.params["adapter"] is None:
        folder = output_directory(context.params["output"], context.params["model"] or "")
        if context.params["overwrite"]:
            raise UserError(
                f"Without --adapter, export writes what the run in {folder} has trained, in place of what it wrote "
                "before: leave --overwrite out."
            )
        if context.get_parameter_source("eval_data") is ParameterSource.COMMANDLINE:
            raise UserError("Without --adapter, export evaluates nothing: leave --eval-data out.")
        command = "train"
        arguments = ("train", *arguments[1:], "--resume", "--export")
        context = parse_command_line(arguments)
        if not (folder.is_dir() or context.params["ssd"]):
            raise UserError(
                f"There is no run in {folder}: name its --output, or give --model and --adapter to merge."
            )
    if command in ("train", "export"):
        _refuse_link_loops(output_directory(context.params["output"], context.params["model"] or ""), context)
    if command in ("train", "export") and (rank is None or rank.is_rank0):
        _put_back(output_directory(context.params["output"], context.params["model"] or ""))
    if command == "train" and _only_measures(context):
        saves = context.get_parameter_source("save") is not ParameterSource.DEFAULT
        context = parse_command_line((*arguments, "--data", RANDOM, *(() if saves else ("--no-save",))))
    try:
        settings = settings_of(command, context, arguments)
    except UserError as error:
        if command == "train" and context.params["gpu"] not in ("auto", "cpu"):
            _check_gpu(context, arguments, error)
        raise
    stay_offline(settings.download)
    _check_inputs(settings, has_data=bool(context.params.get("data")))
    if command == "verify":
        with activity("comparing what is on the drives with its checksums", announced=True):
            from cli.inspect.check import run_verify

            return run_verify(settings.verify)
    if command == "check":
        with activity("looking at this machine, and measuring its drives", announced=True):
            from cli.inspect.check import run_check

            run_check(settings)
    elif command == "demo":
        with _loading(settings):
            from cli.demo import run_demo

        run_demo(settings, interrupts)
    elif command == "chat":
        with _loading(settings):
            from cli.inspect.chat import run_chat

        run_chat(settings)
    elif command in ("export", "evaluate"):
        with _loading(settings):
            from cli.inspect.evaluate import merge_adapter, run_evaluate

        merge_adapter(settings) if command == "export" else run_evaluate(settings)
    elif command == "plan" and settings.plans_cluster:
        from cli.plan.cluster import plan_cluster

        is_typed = context.get_parameter_source("batch_size") is ParameterSource.COMMANDLINE
        is_given = is_typed or settings.batch_size != Settings.batch_size
        with activity("planning", announced=True):
            return plan_cluster(settings, settings.batch_size if is_given else None)
    elif command == "plan" and settings.compare is not None:
        with _loading(settings):
            from cli.plan.compare import run_compare

        with activity("planning: steps of this run are simulated on each machine", announced=True):
            return run_compare(settings, settings.compare)
    elif command == "plan":
        with _loading(settings):
            from cli.plan.out_of_core import run_plan

        with activity("planning: steps of this run are simulated", announced=True):
            return run_plan(settings)
    elif rank is not None and settings.nodes != rank.nodes:
        raise UserError(
            f"torchrun has started the ranks of {counted(rank.nodes, 'node')}: give --nodes {rank.nodes}."
        )
    elif settings.nodes is not None:
        _run_on_nodes(settings, rank, trains=command == "train")
    elif command == "profile":
        with activity("measuring this machine with the model", announced=True):
            from cli.inspect.profile import run_profile

            _quiet(settings)
            run_profile(settings)
    else:
        _train(settings, interrupts)
    return 0


def _only_measures(context: click.Context) -> bool:
    """Return whether there is nothing to learn: a preset, whose weights are random, and no data."""
    options = context.params
    is_preset = options["model"] in preset_files("models") and not Path(options["model"]).exists()
    return is_preset and not (options["data"] or options["eval_data"] or options["resume"])


def _check_gpu(context: click.Context, arguments: Sequence[str], error: UserError) -> None:
    """Say next to ``error``, of a run that is meant for another machine, that its GPU is not here either."""
    from cli.job.throughput import gpu_or_plan

    try:
        gpu_or_plan(context.params["gpu"], arguments, [Path(word) for word in context.params["ssd"]])
    except UserError as lacking:
        raise UserError(f"{error} {lacking}") from None


def _refuse_link_loops(output: Path, context: click.Context) -> None:
    """Refuse links that lead back to themselves: what happens to them later depends on Python's version."""
    paths = [output, *(Path(word).expanduser() for word in context.params.get("ssd", ()))]
    with contextlib.suppress(OSError):  # a name that is too long, say: what checks --output reports it
        paths += output.iterdir()
    for path in paths:
        try:
            os.stat(path)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise UserError(f"{path} is a link that leads back to itself: remove it.") from error


def _put_back(output: Path) -> None:
    """Put back what a killed run has set aside, before anybody looks for the run that is there."""
    with contextlib.suppress(OSError):  # a name that is too long, say: what checks --output reports it
        if (output / REPLACED).exists():
            from cli.job.claim import recover

            recover(output)


def _refuse_set_aside(path: Path) -> None:
    """Refuse to read a result, or a checkpoint that is not in its place, of an output whose files are set aside."""
    for output in [path] if path.exists() else list(path.absolute().parents)[:2]:
        if (output / REPLACED).exists():
            from cli.job.replaced import check_put_back

            check_put_back(output)


def _run_on_nodes(settings: Settings, rank: RankProcess | None, trains: bool) -> None:
    """Launch the ranks of this node, or be one of them."""
    if settings.show_data is not None:
        raise UserError("--show-data needs no nodes: leave --nodes out.")
    if rank is None:
        from cli.launch import launch

        launch(settings, trains=trains)
    elif trains:
        with _loading(settings):
            from cli.train.ranks import train_rank

        train_rank(settings, rank)
    else:
        with _loading(settings):
            from cli.inspect.profile import profile_cluster_of_ranks

        profile_cluster_of_ranks(settings, rank)


def _train(settings: Settings, interrupts: Interrupts) -> None:
    with contextlib.nullcontext() if settings.show_data is not None else started_early():
        with _loading(settings):
            from cli.job.resumed import decided
            from cli.train.engine_trainer import finetune

            settings = decided(settings)
        if settings.show_data is not None:
            from cli.inspect.show_data import show_data

            show_data(settings)
        else:
            finetune(settings, interrupts)


def _no_run(settings: Settings) -> UserError:
    """Return the error that the options of the run in ``--output``, its model among them, are not there."""
    output = settings.output_directory
    outer = next((parent for parent in output.absolute().parents if RunRecord.read(parent)), None)
    if outer is not None:
        return UserError(f"There is no run in {output}: it lies in the output of one. Give --output {outer}.")
    if RunRecord.read(output) is None:
        return UserError(
            f"There is no run in {output} to continue.{nearest_path(output)} If its drives have one, name them with "
            "--ssd; to begin a run there, give --model and --data."
        )
    return UserError(
        f"The options of the run in {output} are neither in its {RUN} folder nor in a commit that is visible: name "
        "its drives with --ssd, or give all of its options."
    )


def _quiet(settings: Settings) -> None:
    """Turn off the hints and progress bars of transformers, which would break the progress line."""
    if not settings.debug:
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()


@contextlib.contextmanager
def _loading(settings: Settings) -> Iterator[None]:
    """Import libraries, without searching their objects for garbage."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        with activity("loading PyTorch and transformers", announced=True):
            yield
            _quiet(settings)
        if not gc.get_freeze_count():
            # A second freeze would keep what an earlier run in this process has left
            gc.freeze()  # the libraries' objects, through which each collection would search again
    finally:
        if was_on:
            gc.enable()


def _check_left(settings: Settings) -> None:
    """Refuse to leave a drive that is to stay."""
    stays = {path.resolve() for path in settings.drives}
    for left in (path for path in settings.drives_to_leave if path.resolve() in stays):
        rest = [str(path) for path in settings.drives if path.resolve() != left.resolve()]
        raise UserError(
            f"--leave-ssd {left} is one of the drives of --ssd, which stay: give --ssd those that are to stay"
            f"{f': --ssd {shlex.join(rest)} --leave-ssd {shlex.quote(str(left))}' if rest else ', or new ones'}."
        )


def _check_inputs(settings: Settings, has_data: bool) -> None:
    """Reject what is missing before PyTorch is loaded."""
    missing = {
        "train": "Give the model to fine-tune with --model DIR or --model PRESET, or try finetune demo.",
        "plan": "Give the model to plan for, --model DIR or --model PRESET; --max-model finds the largest.",
        "chat": "Give what to chat with: finetune chat --model DIR, or --model BASE --adapter DIR.",
        "evaluate": "Give the model and the data to evaluate it on: finetune evaluate --model DIR --data FILE.",
    }
    if settings.command == "train" and settings.resume and not settings.model:
        if settings.output is None:
            raise UserError("--resume continues the run in --output DIR: name that directory.")
        raise _no_run(settings)
    if settings.command in missing and not (settings.model or settings.max_model):
        raise UserError(missing[settings.command])
    if settings.command == "evaluate" and not settings.data:
        raise UserError(missing["evaluate"])
    if settings.command == "train" and not (has_data or settings.resume):
        raise UserError(
            "There is nothing to train on: give --data FILE, or --data random to measure throughput on random tokens."
        )
    for tracker in settings.log_to if settings.command == "train" else ():
        if importlib.util.find_spec(tracker) is None:
            raise UserError(
                f"--log-to {tracker}: the package {tracker} is not installed. Install it with "
                f"`{shlex.quote(sys.executable)} -m pip install {tracker}`, or leave {tracker} out: metrics.jsonl is "
                "always written."
            )
    for word in (settings.model, settings.adapter):
        if word:
            _refuse_set_aside(Path(word).expanduser())
    if settings.model:
        try:
            with naming("--model"):
                check_model(settings.model)
        except UserError as error:
            if settings.resume and RunRecord.read(settings.output_directory):
                error.add_note(
                    "A run needs the weights that it began with: give --model DIR, where they are now."
                )
            raise
    check_path("--adapter", settings.adapter)
    check_path("--peft-config", settings.peft_config)
    if settings.command in ("train", "export") and settings.output is not None:
        check_output("--output", settings.output)
    _check_left(settings)
    for folder in settings.verify:
        check_path("verify", Path(folder))
    for name in (*settings.data, *settings.eval_data):
        check_data_file(split_weight(name)[0])
    if settings.ssd and settings.command != "check":  # which reports them among other problems
        usable_directories(settings.drives)


if __name__ == "__main__":
    sys.exit(main())
