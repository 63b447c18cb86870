"""Start a run's ranks on this node: find the other nodes, start PyTorch's agent, and pass signals on."""

import dataclasses
import json
import logging
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from types import FrameType
from typing import Any, NoReturn

import psutil

from cli.options.settings import Settings
from cli.train import process
from cli.train.process import LAUNCH, STATUS, STOP, Stopped
from common.activity import activity
from common.errors import FinetuneError, UserError, as_message
from common.hardware.machine import cpu_count, usable_gpus
from common.scratch import scratch_folder
from common.units import counted, format_seconds

DEFAULT_PORT = 29400  # torchrun's
_OUTSIDE = "192.0.2.1"  # an address for documentation


@dataclass(frozen=True)
class Rendezvous:
    """The endpoint where the launchers of all nodes meet."""

    nodes: int
    host: str = "127.0.0.1"
    port: int = 0  # any free port, for a single node
    run_id: str = "finetune"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def locate(self) -> tuple[str, bool]:
        """Return this machine's address on the route to the endpoint, and whether the endpoint is on this machine."""
        try:
            family, _, _, _, target = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM)[0]
            address = _address_towards(family, target)
        except OSError as error:
            raise UserError(
                f"--rdzv-endpoint {self} cannot be reached from here: {error.strerror}. Give a name or an address of "
                "one of the nodes that all nodes can reach."
            ) from error
        is_here = address == target[0] or str(target[0]).startswith("127.")
        if address.startswith("127.") and not self.host.startswith(("127.", "localhost")):
            # A name of this machine, which Debian's /etc/hosts gives 127.0.1.1: where others reach it is the way out.
            with suppress(OSError):
                address = _address_towards(socket.AF_INET, (_OUTSIDE, DEFAULT_PORT))
        return address, is_here


def find_rendezvous(settings: Settings, environment: Mapping[str, str] = os.environ) -> Rendezvous:
    """Return where the launchers of a run meet."""
    nodes = settings.nodes or 1
    slurm = {
        name.removeprefix("SLURM_"): value for name, value in environment.items() if name.startswith("SLURM_")
    }
    in_step = "STEP_NODELIST" in slurm and settings.rdzv_endpoint is None
    if in_step:
        step_nodes = slurm.get("STEP_NUM_NODES", str(nodes))
        tasks = slurm.get("STEP_NUM_TASKS", step_nodes)
        if not tasks == step_nodes == str(nodes):
            raise UserError(
                f"--nodes {nodes}: srun has started finetune {tasks} times on {step_nodes} nodes. Start it once on "
                f"each, and it starts the ranks itself: srun --nodes {nodes} --ntasks-per-node 1 finetune ..."
            )
    if nodes == 1:
        return Rendezvous(1)
    if settings.rdzv_endpoint is not None:
        return Rendezvous(nodes, *_parse_endpoint(settings.rdzv_endpoint))
    if in_step:
        job = int(slurm.get("JOB_ID", 0))
        step = int(slurm.get("STEP_ID", 0))
        port = 20_000 + (job * 31 + step) % 10_000  # several jobs may share a node
        return Rendezvous(nodes, first_host(slurm["STEP_NODELIST"]), port, f"finetune-{job}-{step}")
    if "MASTER_ADDR" in environment:
        address = f"{environment['MASTER_ADDR']}:{environment.get('MASTER_PORT', DEFAULT_PORT)}"
        return Rendezvous(nodes, *_parse_endpoint(address))
    raise UserError(
        f"--nodes {nodes}: nothing names the other nodes. Choose one of them and a free port there, start the same "
        f"line on every node, and add to it: --rdzv-endpoint {socket.gethostname()}:{DEFAULT_PORT}. With Slurm: srun "
        f"--nodes {nodes} --ntasks-per-node 1 finetune ..."
    )


def first_host(node_list: str) -> str:
    """Return the first name of Slurm's short form: that of ``gpu[01-03,7],login`` is gpu01."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", node_list)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0] if first else node_list)


def _address_towards(family: int, target: Any) -> str:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        return str(probe.getsockname()[0])


def _parse_endpoint(text: str) -> tuple[str, int]:
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    try:
        return parse_rendezvous_endpoint(text, DEFAULT_PORT)
    except ValueError as error:
        raise UserError(f"--rdzv-endpoint {text!r} is not HOST:PORT, as in node0:{DEFAULT_PORT}.") from error


_STOP_WAIT_S = 30.0


def launch(settings: Settings, *, trains: bool = True) -> None:
    """Start this node's ranks and wait for their end; batch and output matter only if it ``trains``."""
    if not settings.debug:  # PyTorch reads these when it is imported, and ranks inherit them
        for name, value in (
            ("LOGLEVEL", "CRITICAL"),
            ("TORCH_CPP_LOG_LEVEL", "FATAL"),
            ("PYTHONWARNINGS", "ignore"),
        ):
            os.environ.setdefault(name, value)
    with activity("loading PyTorch and transformers", announced=True):
        from cli.job.resolve import check_start
        from cli.job.resumed import decided

    settings = decided(settings, checks=trains)
    ranks = _ranks_per_node(settings)
    if trains:
        check_start(settings, ranks)
    rendezvous = find_rendezvous(settings)
    with scratch_folder(Path(gettempdir())) as folder:
        launcher = _Launcher(settings, rendezvous, ranks, folder)
        if rendezvous.nodes > 1:
            print(
                f"nodes    waiting for {rendezvous.nodes} of them at {rendezvous}{launcher.listens}",
                flush=True,
            )
        print(f"nodes    starting {counted(ranks, 'rank')} on this node", flush=True)
        launcher.run()


def _ranks_per_node(settings: Settings) -> int:
    if settings.gpu not in ("auto", "cpu"):
        raise UserError(
            f"--gpu {settings.gpu}: with --nodes, every rank has its own GPU. Give --gpus-per-node, choose GPUs with "
            "CUDA_VISIBLE_DEVICES, or compute on the CPU with --gpu cpu."
        )
    gpus = 0 if settings.gpu == "cpu" else len(usable_gpus())
    ranks = settings.gpus_per_node or gpus or 1
    if gpus and ranks > gpus:
        raise UserError(
            f"--gpus-per-node {ranks}: this node has {gpus}. For ranks on the CPU, add --gpu cpu."
        )
    return ranks


class _Launcher:
    """The agent runs in a thread, so that signals interrupt this one while PyTorch waits for the network."""

    def __init__(self, settings: Settings, rendezvous: Rendezvous, ranks: int, folder: Path):
        self._settings = settings
        self._rendezvous = rendezvous
        self._ranks = ranks
        self._folder = folder
        self._address, self._is_here = rendezvous.locate()
        self._signal: int | None = None
        self._deadline = float("inf")

    @property
    def listens(self) -> str:
        """Return where this node listens for the others, in parentheses, if the endpoint's name differs."""
        return (
            f" (listening at {self._address})"
            if self._is_here and self._address != self._rendezvous.host
            else ""
        )

    def run(self) -> None:
        before = dict(os.environ)
        ended = Future[str]()
        os.environ.update(self._variables())
        for number in STATUS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, self._receive)
        try:
            threading.Thread(target=self._run_agent, args=(ended,), daemon=True).start()
            self._wait(ended)
        finally:
            os.environ.clear()
            os.environ.update(before)
            logging.disable(logging.NOTSET)
        for status, message in self._outcomes():
            if status in STATUS.values():
                raise Stopped(message, self._signal)
            error = FinetuneError(message)
            error.exit_status = status
            raise error
        if ended.result():
            raise FinetuneError(f"{ended.result()}{self._how_to_continue()}")

    def _variables(self) -> dict[str, str]:
        """Return the environment variables that ranks get; what the user has set stays."""
        from cli.train.sockets import interface_variables

        usual = {
            "OMP_NUM_THREADS": str(max(1, cpu_count() // self._ranks)),
            **interface_variables(self._address),
        }
        return {name: value for name, value in usual.items() if name not in os.environ} | {
            LAUNCH: uuid.uuid4().hex,
            # The user's own directory must not shadow our packages: same search path as ours, no "" in front.
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            # Rank 0 opens a new store, on a free port, for each start: nothing is left over from the start before.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }

    def _run_agent(self, ended: Future[str]) -> None:
        try:
            # Of several launchers on one machine, the second finds the port in use, and connects to the first.
            failures = (self._failure(is_host) for is_host in ((True, False) if self._is_here else (False,)))
            ended.set_result(
                next((failure for failure in failures if failure is not None), self._lost_contact())
            )
        except BaseException as error:
            ended.set_exception(error)

    def _failure(self, is_host: bool) -> str | None:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import (
            RendezvousClosedError,
            RendezvousError,
            RendezvousTimeoutError,
        )
        from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        from cli.train.sockets import BACKEND, rendezvous_handler

        settings = self._settings
        rendezvous = self._rendezvous
        timeout = self._settings.node_timeout
        meets_at = dataclasses.replace(rendezvous, host=self._address) if self._is_here else rendezvous
        rendezvous_handler_registry.register(BACKEND, rendezvous_handler)
        config = LaunchConfig(
            min_nodes=rendezvous.nodes,
            max_nodes=rendezvous.nodes,
            nproc_per_node=self._ranks,
            run_id=rendezvous.run_id,
            rdzv_backend=BACKEND,
            rdzv_endpoint=str(meets_at),
            rdzv_configs=dict.fromkeys(("timeout", "join_timeout", "read_timeout"), timeout)
            | {"is_host": is_host},
            local_addr=self._address,
            max_restarts=settings.max_restarts,
            logs_specs=DefaultLogsSpecs(log_dir=str(self._folder)),
        )
        if not settings.debug:
            logging.disable(logging.ERROR)  # the agent reports what is reported here once
        try:
            elastic_launch(config, sys.executable)("-P", "-m", "cli.main", *settings.arguments)
        except ChildFailedError as error:
            # A rank that was killed is the cause; others have lost contact with it.
            rank, failed = min(error.failures.items(), key=lambda item: item[1].exitcode)
            why = f"ended with status {failed.exitcode}; its message is above."
            if failed.exitcode < 0:
                why = f"was killed by {failed.signal_name()}" + (
                    ", as the system does when memory runs out."
                    if failed.exitcode == -signal.SIGKILL
                    else "."
                )
            return f"Rank {rank} {why} The run ends after {counted(settings.max_restarts, 'restart')} (--max-restarts)."
        except RendezvousTimeoutError:
            return (
                f"Not all {rendezvous.nodes} nodes have come to {rendezvous} within {format_seconds(timeout)} "
                "(--node-timeout). Start finetune with the same options on every node."
            )
        except RendezvousClosedError:
            return "The run has ended on another node, which reports why."
        except RendezvousError:
            return None
        return ""

    def _lost_contact(self) -> str:
        return (
            f"No contact with {self._rendezvous}, where the nodes meet: finetune does not run there, another program "
            "has the port, or the network is down."
        )

    def _wait(self, ended: Future[str]) -> None:
        last_seen = time.monotonic()
        while not wait([ended], 1.0).done:
            now = time.monotonic()
            if _running_ranks():
                last_seen = now
            if now > self._deadline:
                self._exit(f"stopped at once, after {process.STOP_SECONDS:.0f} s.")
            if self._signal is not None and now - last_seen > _STOP_WAIT_S:
                # The agent waits for nodes that are lost
                self._exit("stopped at once.")
            if now - last_seen > 2 * self._settings.node_timeout + 60:
                # PyTorch's store may wait for 15 minutes
                self._exit(f"finetune: error: {self._lost_contact()}")

    def _outcomes(self) -> list[tuple[int, str]]:
        starts = sorted(self._folder.glob("*/attempt_*"), key=lambda path: path.stat().st_mtime_ns)
        files = sorted(starts[-1].glob("*/error.json")) if starts else []
        contents = [json.loads(file.read_text())["message"] for file in files]
        return [(content["errorCode"], content["message"]) for content in contents]

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Have the ranks finish and commit their step; at a second signal, end everything now."""
        ranks = _running_ranks()
        ends_now = self._signal is not None or not ranks
        self._signal = self._signal or number
        if ends_now:
            self._exit("stopped at once.")
        os.environ[STOP] = "1"
        if number != signal.SIGINT:  # nobody may be there to send a second signal
            self._deadline = time.monotonic() + process.STOP_SECONDS
        with suppress(OSError):  # the terminal may be gone
            print("\nstopping after this step (once more: at once)", file=sys.stderr, flush=True)
        for rank in ranks:
            with suppress(psutil.Error):
                rank.send_signal(signal.SIGHUP if number == signal.SIGHUP else signal.SIGINT)

    def _exit(self, text: str) -> NoReturn:
        for rank in _running_ranks():
            with suppress(psutil.Error):
                rank.kill()
        with suppress(OSError):
            print(f"\n{as_message(text)}{self._how_to_continue()}", file=sys.stderr, flush=True)
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(1 if self._signal is None else STATUS[signal.Signals(self._signal)])

    def _how_to_continue(self) -> str:
        from cli.job.resumed import EarlierRun

        return (
            f" {self._settings.how_to_continue}" if EarlierRun.of(self._settings).commit is not None else ""
        )


def _running_ranks() -> list[psutil.Process]:
    ranks = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:
                # Which an agent that waits for the network does not reap
                ranks.append(child)
    return ranks
