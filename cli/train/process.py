"""The process that trains, alone or as one of several ranks: the signals that it hears, and how it ends.

The status is a shell's for each: 130 for Ctrl-C, 143 for SIGTERM, by which job schedulers end a job, 129 for SIGHUP,
when the terminal goes away (and not heard at all under nohup). After the last two no user is there to press Ctrl-C
again, so they come with a deadline.
"""

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import stat
import sys
import threading
import time
from dataclasses import astuple, dataclass
from types import FrameType
from typing import Any, NoReturn

import psutil

from common.errors import as_message, on_one_line

# After SIGTERM or SIGHUP, a run that has not ended by then ends at once: schedulers commonly kill after 30 s, and the
# last committed step is as safe either way.
STOP_SECONDS = 25.0

STATUS = {number: 128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
_OF_RANKS = {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE"}
"""Variables of ranks, started by torchrun or by our launcher; commands that these start may inherit some."""
LAUNCH = "FINETUNE_LAUNCH"  # id of our launcher
STOP = "FINETUNE_STOP"  # exists once the user has stopped the run, for ranks that start after that
_ENDING = "ending"
_GRACE_S = 3.0  # Seconds that an announced ending may take to reach all ranks
_PR_SET_PDEATHSIG = 1


class Stopped(Exception):
    """Raised when the user has stopped the run; the message says how to continue."""

    def __init__(self, message: str, number: int | None = None) -> None:
        super().__init__(message)
        # Signal that stopped the run, if it is not the one that :class:`Interrupts` has received
        self.number = number


class Interrupts:
    """Interrupts is a context in which the first signal that ends a run raises KeyboardInterrupt, and only that one.

    So pressing Ctrl-C twice does not cut short what puts the run in order. An exception that a signal raises can get
    lost (in a destructor, in a library's callback); :meth:`enter` raises it again. If the process ends with the context
    (``ends_process``), no signal is heard after it.
    """

    # As the loop sees a process that trains alone
    is_rank0 = True
    world_size = 1
    restarted = False

    def __init__(self, ends_process: bool = False) -> None:
        self._ends_process = ends_process
        self._is_done = False
        self.how_to_continue = ""  # Sentence to print if the deadline passes
        self.where = "before the first step"  # How far the run has come, for messages
        self._received: int | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._deadline: threading.Timer | None = None

    def enter(self, where: str) -> None:
        """Raise KeyboardInterrupt if a signal came; the loop calls this at each stage of a run."""
        if self._received is not None:
            raise KeyboardInterrupt
        self.where = where

    def agree(self, wish: bool) -> bool:
        """Return the wish: no other rank has one."""
        return wish

    def finish(self) -> None:
        """Hear no more signals: all is done, and what is left to do is quick."""
        self._is_done = True

    def status(self, stopped: Stopped | None = None) -> int:
        number = stopped.number if stopped is not None and stopped.number is not None else self._received
        return STATUS[signal.Signals(number or signal.SIGINT)]

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():  # Python sets signal handlers nowhere else
            for number in STATUS:
                if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue  # nohup
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self._ends_process else handler)
        if self._deadline is not None:
            self._deadline.cancel()

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if self._received is not None or self._is_done:
            return
        self._received = signum
        if signum != signal.SIGINT:
            self._deadline = threading.Timer(STOP_SECONDS, self._give_up)
            self._deadline.daemon = True
            self._deadline.start()
        raise KeyboardInterrupt

    def _give_up(self) -> None:
        with contextlib.suppress(OSError):
            print(
                f"\nstopped at once, after {STOP_SECONDS:.0f} s. {self.how_to_continue}",
                file=sys.stderr,
                flush=True,
            )
        os._exit(self.status())


@dataclass(frozen=True)
class Outcome:
    """The exit status of the command, and the message for the user if it is not 0."""

    status: int
    message: str = ""


def is_rank() -> bool:
    """Return whether this process was started as one of several ranks."""
    return os.environ.keys() >= _OF_RANKS


class RankProcess:
    """A rank's process, as torchrun's variables number it."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.is_rank0 = self.rank == 0
        self.restarted = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
        self.stopping = STOP in os.environ
        # A restarted rank finds this id in the commits of its run, and continues from them.
        parent = psutil.Process(os.getppid())
        self.launch = os.environ.get(LAUNCH) or f"{socket.gethostname()} {parent.pid} {parent.create_time()}"
        self._where = "before the first step"
        self._store: Any = None
        # Ranks are in their own sessions, where nothing else would end them with a killed launcher.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, self._stop)
        signal.signal(signal.SIGHUP, self._stop)

    @property
    def node(self) -> int:
        return int(os.environ["GROUP_RANK"])

    @property
    def nodes(self) -> int:
        return int(os.environ["GROUP_WORLD_SIZE"])

    def move(self, node: int) -> None:
        """Give this rank's node another number, before it connects; rank 0 keeps its number."""
        ranks_per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        self.rank = node * ranks_per_node + self.rank % ranks_per_node
        os.environ.update(RANK=str(self.rank), GROUP_RANK=str(node))  # libraries read them, too

    def enter(self, where: str) -> None:
        """Note how far the run has come, for messages."""
        self._where = where

    def agree(self, wish: bool) -> bool:
        from common.communication import all_gather_object  # which imports PyTorch

        return any(all_gather_object(wish))

    def listen(self, store: Any) -> None:
        """End this process, whose main thread may wait in a collective, when another rank announces an ending."""
        self._store = store
        threading.Thread(target=self._listen, name="listen", daemon=True).start()

    def end(self, outcome: Outcome) -> NoReturn:
        """End this rank, and with an error all others."""
        store = self._store
        self._store = None
        if outcome.status and outcome.status not in STATUS.values() and self.nodes > 1:
            outcome = Outcome(
                outcome.status, f"Rank {self.rank} on {socket.gethostname()}: {outcome.message}"
            )
        if outcome.status and store is not None:
            with contextlib.suppress(Exception):  # rank 0 has ended, and the store with it
                announced = store.compare_set(_ENDING, "", json.dumps(astuple(outcome)))
                outcome = Outcome(*json.loads(announced))
        if LAUNCH not in os.environ:
            _say(outcome.message)
        self._leave(outcome)

    def lose(self, error: BaseException) -> NoReturn:
        """End this rank because another is lost. The agent then starts all again, from the last commit."""
        # The listening thread ends this process if the other rank has announced an ending
        time.sleep(_GRACE_S)
        # Without gloo's advice
        reason = re.sub(r"^\[\S+\] ", "", on_one_line(error)).partition(". ")[0][:300]
        _say(f"rank {self.rank} of {self.world_size} lost contact with another rank {self._where} ({reason})")
        _exit(1)

    def _listen(self) -> None:
        with contextlib.suppress(Exception):  # rank 0 has ended: collectives fail
            while not self._store.check([_ENDING]):
                time.sleep(0.3)
            self._leave(Outcome(*json.loads(self._store.get(_ENDING))))

    def _leave(self, outcome: Outcome) -> NoReturn:
        if outcome.status and self.is_rank0:
            time.sleep(_GRACE_S)  # others read the ending in the store that this process holds
        if outcome.status and "TORCHELASTIC_ERROR_FILE" in os.environ:  # in the format of torch's @record
            extra = {"timestamp": str(int(time.time())), "py_callstack": outcome.message}
            content = {"message": outcome.message, "errorCode": outcome.status, "extraInfo": extra}
            with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
                json.dump({"message": content}, file)
        # Status 0 keeps our launcher's agent from restarting what failed for good.
        _exit(0 if LAUNCH in os.environ else outcome.status)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopping = True
        if number == signal.SIGHUP:  # writing to a terminal that is gone would be an error
            null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            for descriptor in (1, 2):
                if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                    os.dup2(null, descriptor)


def is_lost_contact(error: BaseException) -> bool:
    """Return whether a collective failed because of the network or another rank, not because of its arguments."""
    import torch.distributed as dist

    words = ("gloo", "Connection", "Timed out")
    is_collective = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    return is_collective or isinstance(error, dist.DistError | ConnectionError)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(
            f"finetune: {as_message(text)}" if text else "",
            end="\n" if text else "",
            file=sys.stderr,
            flush=True,
        )


def _exit(status: int) -> NoReturn:
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
