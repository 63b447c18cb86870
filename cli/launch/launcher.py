"""``finetune --nodes``: the launcher of this node, which starts ranks through torchrun's elastic agent.

A rank that ends in an orderly way, with success, an error worth a message or Ctrl-C, exits with status 0 and leaves
its outcome (:mod:`cli.train.ranks.outcomes`): the agent need not start it again. A rank that is killed, or loses
contact with others, exits with another status; then all ranks of all nodes are started again from the last commit, as
often as ``--max-restarts`` says.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import psutil

from cli.launch.rendezvous import Rendezvous, find_meeting, wait_for_host
from cli.options.settings import COMMITS, Settings
from cli.train import interrupts
from cli.train.interrupts import STATUS, Stopped
from cli.train.ranks.liveness import LAUNCH, STOP
from cli.train.ranks.outcomes import Outcome, RankOutcomes
from common.errors import FinetuneError, UserError
from common.hardware.machine import cpu_count, list_gpus
from common.units import counted, format_seconds

INTERRUPTED = 130
"""Status of a rank that the user has stopped."""


class LaunchError(FinetuneError):
    """Raised when a rank has ended with an outcome, whose status and message it has."""

    def __init__(self, outcome: Outcome):
        super().__init__(outcome.message)
        self.exit_status = outcome.status


def launch(settings: Settings, *, trains: bool = True) -> None:
    """Start this node's ranks and wait for their end.

    Args:
        trains: False: they only measure (``--profile``), so nothing is asked of batch and output.

    Raises:
        Stopped, UserError, FinetuneError: how the run ended.
    """
    if not settings.debug:
        _quieten_torch()
    ranks = ranks_per_node(settings)
    if trains and settings.batch_size < ranks * (settings.nodes or 1):
        raise UserError(
            f"--batch-size {settings.batch_size} is less than one sequence for each of {ranks * (settings.nodes or 1)} "
            f"ranks ({settings.nodes} x {ranks})."
        )
    meeting = find_meeting(settings)
    if trains:
        _check(settings)
    if meeting.nodes > 1:
        print(f"nodes    waiting for {meeting.nodes} of them at {meeting.endpoint}", flush=True)
    wait_for_host(meeting, settings.node_timeout)
    if not settings.quiet:
        print(f"nodes    starting {counted(ranks, 'rank')} on this node", flush=True)
    with RankOutcomes(ranks) as outcomes:
        with _environment(_variables(settings, meeting) | outcomes.variables), _Signals(settings) as signals:
            failure = _run_agent(settings, meeting, ranks)
        ended = next((outcome for outcome in outcomes.read() if outcome.status), None)
    if ended is not None and ended.status == INTERRUPTED:
        raise Stopped(ended.message, signals.number)
    if ended is not None:
        raise LaunchError(ended)
    if failure is not None:
        if has_commit(settings):
            failure.add_note(settings.how_to_continue)
        if signals.received:
            raise Stopped(" ".join(["stopped at once.", *getattr(failure, "__notes__", [])]), signals.number)
        raise failure


def ranks_per_node(settings: Settings) -> int:
    """Return how many ranks this node is to have.

    Raises:
        UserError: ``--gpu`` picks one of several GPUs, or there are fewer than asked for.
    """
    if settings.gpu not in ("auto", "cpu"):
        raise UserError(
            f"--gpu {settings.gpu}: with --nodes, every rank has a GPU of its own. Give --gpus-per-node, choose GPUs "
            "with CUDA_VISIBLE_DEVICES, or compute on the CPU with --gpu cpu."
        )
    there = 0 if settings.gpu == "cpu" else len(list_gpus())
    wanted = settings.gpus_per_node or there or 1
    if there and wanted > there:
        raise UserError(f"--gpus-per-node {wanted}: this node has {there}. For ranks on the CPU, add --gpu cpu.")
    return wanted


def _quieten_torch() -> None:
    """Keep PyTorch from reporting what we report. It reads these variables when imported, and ranks inherit them."""
    for name, value in (("LOGLEVEL", "CRITICAL"), ("TORCH_CPP_LOG_LEVEL", "FATAL"), ("PYTHONWARNINGS", "ignore")):
        os.environ.setdefault(name, value)


def _check(settings: Settings) -> None:
    """Check what can be checked before anybody waits for other nodes.

    Raises:
        UserError: something typed does not exist, or does not go with what is there.
    """
    from cli.job.prepare import check
    from cli.job.strategy import check_strategy

    check_strategy(settings, ranks_per_node(settings))
    found = check(settings)
    commits = found.ssd[0] / found.run_name
    if has_commit(settings):
        if not (settings.resume or settings.overwrite):
            raise UserError(
                f"{commits} holds a run already: add --resume to continue it, --overwrite to replace it, or give "
                "another --output."
            )
    elif settings.resume and not settings.ssd:  # else the ranks say together which node lacks what
        raise UserError(f"--resume: there is nothing to continue, no commit in {commits}. Leave it out to begin.")


def has_commit(settings: Settings) -> bool:
    """Return whether there is something to continue."""
    if settings.ssd:
        from cli.job.prepare import check
        from common.store.manifest import MANIFEST_FILE
        from fuyou.checkpoint.run_files import rank_folder

        found = check(settings)
        folders = [path / found.run_name for path in found.ssd]
        ranks = any(any(folder.glob(f"{rank_folder('*')}/{MANIFEST_FILE}")) for folder in folders)
        return ranks or any((folder / MANIFEST_FILE).exists() for folder in folders)
    from fcdp.checkpoint.commits import ShardedCheckpoints

    return ShardedCheckpoints(settings.output_directory / COMMITS).newest() is not None


def _variables(settings: Settings, meeting: Rendezvous) -> dict[str, str]:
    """Return the environment variables that ranks get."""
    variables = {
        LAUNCH: uuid.uuid4().hex,
        # The user's own directory must not shadow our packages: same search path as ours, no "" in front.
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        # Rank 0 opens a store of its own for each start, so that nothing is left over from the one before.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    usual = {"OMP_NUM_THREADS": str(max(1, cpu_count() // ranks_per_node(settings)))}
    if meeting.interface is not None:
        usual |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), meeting.interface)
    return variables | {name: value for name, value in usual.items() if name not in os.environ}


def _run_agent(settings: Settings, meeting: Rendezvous, ranks: int) -> FinetuneError | None:
    """Run the ranks of this node to their end.

    Returns:
        None if they ended in an orderly way, else what happened.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError, RendezvousTimeoutError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    timeout = settings.node_timeout
    config = LaunchConfig(
        min_nodes=meeting.nodes,
        max_nodes=meeting.nodes,
        nproc_per_node=ranks,
        run_id=meeting.run_id,
        rdzv_backend="c10d",
        rdzv_endpoint=meeting.endpoint,
        rdzv_configs={
            "timeout": timeout,
            "join_timeout": timeout,
            # A store whose network comes back must not have given up meanwhile: the lifeline decides that, earlier.
            "read_timeout": 2 * timeout + 10,
            "is_host": meeting.is_host,
        },
        local_addr=meeting.address,
        max_restarts=settings.max_restarts,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        signals_to_handle="SIGQUIT",  # the others are ours
    )
    words = [sys.executable, "-P", "-m", "cli.launch.rank", *settings.arguments]
    if not settings.debug:
        logging.disable(logging.ERROR)  # the agent reports what is said here once
    lifeline = _Lifeline(meeting, settings)
    try:
        elastic_launch(config, words[0])(*words[1:])
    except ChildFailedError as error:
        return FinetuneError(_what_failed(error, settings))
    except RendezvousTimeoutError:
        return FinetuneError(
            f"Not all {meeting.nodes} nodes have come to {meeting.endpoint} within {format_seconds(timeout)} "
            "(--node-timeout). Start finetune with the same options on every node."
        )
    except RendezvousClosedError:
        return FinetuneError("The run has ended on another node; what happened is said there.")
    except RendezvousError:
        return FinetuneError(
            f"Lost contact with {meeting.endpoint}, where the nodes meet: the launcher there has ended, "
            "or the network is down."
        )
    except (SignalException, KeyboardInterrupt):
        return FinetuneError("The launcher was told to end.")
    finally:
        lifeline.let_go()
        logging.disable(logging.NOTSET)
    return None


class _Lifeline:
    """A lifeline ends a launcher that is cut off from the meeting point, where PyTorch's store would wait for ever."""

    def __init__(self, meeting: Rendezvous, settings: Settings):
        self._meeting, self._settings = meeting, settings
        self._done = threading.Event()
        if not meeting.is_host:
            threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def let_go(self) -> None:
        """Stop watching."""
        self._done.set()

    def _watch(self) -> None:
        timeout = self._settings.node_timeout
        answered = time.monotonic()
        while not self._done.wait(min(5.0, timeout / 4)):
            with contextlib.suppress(OSError):
                socket.create_connection((self._meeting.host, self._meeting.port), timeout=timeout / 4).close()
                answered = time.monotonic()
            # Ranks have the same patience, and this agent may still learn by itself how the run has ended.
            if time.monotonic() - answered > 1.5 * timeout + 5 and not self._done.is_set():
                _kill(psutil.Process().children())
                text = (
                    f"Nothing has been heard from {self._meeting.endpoint}, where nodes meet, for {timeout} s and more."
                )
                if has_commit(self._settings):
                    text += f" {self._settings.how_to_continue}"
                print(f"finetune: error: {text}", file=sys.stderr, flush=True)
                os._exit(1)


def _what_failed(error: Any, settings: Settings) -> str:
    failures = error.failures
    # One that was killed is the cause; others have lost contact with it.
    rank, failure = next(
        ((rank, failure) for rank, failure in failures.items() if failure.exitcode < 0), next(iter(failures.items()))
    )
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        what = f"Rank {rank} of this node was killed by {name}" + (
            ", as the system does when memory runs out." if name == "SIGKILL" else "."
        )
    else:
        what = f"Rank {rank} of this node ended with status {failure.exitcode}; what it said is above."
    times = settings.max_restarts
    restarted = f"{times} restart{'s' if times != 1 else ''} (--max-restarts)" if times else "no restart"
    return f"{what} The run is given up after {restarted}."


class _Signals:
    """Signals ask the ranks to finish and commit their step, and at a second one, end everything at once.

    After SIGTERM or SIGHUP nobody may be there to send a second one: :data:`STOP_SECONDS` later it counts as sent, and
    the step in flight is discarded.

    Args:
        settings: of the run.
    """

    def __init__(self, settings: Settings) -> None:
        self.received = False
        self.number: int | None = None
        self._settings = settings
        self._before: dict[signal.Signals, Any] = {}
        self._deadline: threading.Timer | None = None

    def __enter__(self) -> "_Signals":
        self._before[signal.SIGQUIT] = signal.getsignal(signal.SIGQUIT)  # PyTorch's agent sets it
        for number in STATUS:
            self._before[number] = signal.getsignal(number)
            if number is not signal.SIGHUP or self._before[number] is not signal.SIG_IGN:  # nohup
                signal.signal(number, self._receive)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        ranks = psutil.Process().children()
        self.number = self.number or number
        if self.received or not ranks:
            self.received = True
            raise KeyboardInterrupt
        self.received = True
        os.environ[STOP] = "1"
        if number != signal.SIGINT:
            self._deadline = threading.Timer(interrupts.STOP_SECONDS, self._give_up)
            self._deadline.daemon = True
            self._deadline.start()
        with contextlib.suppress(OSError):  # the terminal may be gone
            print("\nstopping after this step (once more: at once)", file=sys.stderr, flush=True)
        for rank in ranks:
            with contextlib.suppress(psutil.Error):
                rank.send_signal(signal.SIGHUP if number == signal.SIGHUP else signal.SIGINT)

    def _give_up(self) -> None:
        """End at once. Optimizer processes notice that their ranks are gone, and end as well."""
        assert self.number is not None
        _kill(psutil.Process().children())
        text = f"stopped at once, after {interrupts.STOP_SECONDS:.0f} s."
        if has_commit(self._settings):
            text += f" {self._settings.how_to_continue}"
        with contextlib.suppress(OSError):
            print(f"\n{text}", file=sys.stderr, flush=True)
        os._exit(STATUS[signal.Signals(self.number)])


def _kill(ranks: Iterable[psutil.Process]) -> None:
    for rank in ranks:
        with contextlib.suppress(psutil.Error):
            rank.kill()


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Add variables to our environment, which ranks inherit."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
