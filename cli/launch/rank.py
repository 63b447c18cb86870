"""One rank of ``finetune --nodes``, started by the launcher: reads the same command line and trains its part.

However a rank ends, it says so once and nothing hangs. While the main thread may wait inside a collective that will
never complete, two others keep watch: one for the launcher's order to end and for a launcher that is gone, the other,
by way of a store that rank 0 holds, for an ending that another rank has announced and for ranks that fall silent.
"""

import contextlib
import json
import os
import signal
import socket
import stat
import sys
import threading
import time
import traceback
from types import FrameType
from typing import Any, NoReturn

from cli.launch.interrupts import Stopped
from cli.launch.nodes import INTERRUPTED, STOP
from cli.launch.outcomes import Outcome, OwnOutcome
from cli.options.command import parse_command_line
from cli.options.settings import Settings
from common.errors import FinetuneError

_LOOK_EVERY_S = 0.3
_GRACE_S = 3.0
"""Time for news from another rank to arrive before this one says that it has lost contact."""
_ENDING = "ending"


class Rank:
    """What this process knows about itself and the others."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.world = int(os.environ["WORLD_SIZE"])
        self._outcome = OwnOutcome()
        self.restarts = self._outcome.restarts
        """How often this launcher has started the rank before."""
        self.stopping = STOP in os.environ
        """The user wants this run to stop."""
        self.where = "before the first step"
        """For messages."""
        self._news: Any = None
        self._closing = False
        self._patience = self._heard = 0.0
        self._lock = threading.Lock()
        self._launcher = os.getppid()

    def watch(self) -> None:
        """Begin to watch. Signals are dealt with from here on."""
        signal.signal(signal.SIGINT, self._stop)
        signal.signal(signal.SIGHUP, self._hang_up)
        # The launcher's SIGTERM must be heard while the main thread is inside a collective.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def connect(self, news: Any, patience: float) -> None:
        """Hear, and tell, what happens to others, from now on.

        Args:
            news: a store client that nobody else uses.
            patience: seconds of silence after which a rank counts as lost.
        """
        self._news, self._patience, self._heard = news, patience, time.monotonic()
        threading.Thread(target=self._listen, name="listen", daemon=True).start()

    def disconnect(self) -> None:
        """All ranks have done their work: whoever leaves now is not missed."""
        with self._lock:
            self._closing = True

    def end(self, outcome: Outcome) -> NoReturn:
        """End this rank in an orderly way, and with an error all others."""
        if outcome.status and self._news is not None:
            try:
                told = self._news.compare_set(_ENDING, "", json.dumps([outcome.status, outcome.message]))
                outcome = Outcome(*json.loads(told))
                self._acknowledge()
            except Exception:  # the store is gone, and with it rank 0: nobody is left to tell
                pass
        self._outcome.leave(outcome)
        _leave(0)

    def lose(self, reason: str) -> NoReturn:
        """Another rank is lost, and so is this start of the run; unless an ending has been announced."""
        time.sleep(_GRACE_S)  # the other thread ends this process if there is news
        self._say(f"lost contact with another rank {self.where} ({reason})")
        _leave(1)

    def _watch(self) -> None:
        """What must work even while the store does not answer."""
        while True:
            if signal.sigtimedwait({signal.SIGTERM}, _LOOK_EVERY_S) is not None:
                self._say(f"ended {self.where} {'as asked' if self.stopping else 'because another rank was lost'}")
                _leave(1)
            if os.getppid() != self._launcher:
                self._say(f"ended {self.where}: its launcher is gone")
                _leave(1)
            silence = time.monotonic() - self._heard
            if self._news is not None and not self._closing and silence > self._patience:
                self._say(f"lost contact with rank 0 {self.where}: no answer for {silence:.0f} s")
                _leave(1)

    def _listen(self) -> None:
        """Tell rank 0 that this rank is alive, and look for an ending. A store on a dead network blocks for ever."""
        beats = {rank: (0, time.monotonic()) for rank in range(self.world)}
        while True:
            time.sleep(_LOOK_EVERY_S)
            with self._lock:
                if self._closing:
                    return
                try:
                    self._news.add(f"beat{self.rank}", 1)
                    if self._news.check([_ENDING]):
                        outcome = Outcome(*json.loads(self._news.get(_ENDING)))
                        self._acknowledge()
                        self._outcome.leave(outcome)
                        _leave(0)
                except Exception as error:  # closed: rank 0 is gone
                    time.sleep(2 * _GRACE_S)  # the main thread may know more
                    self._say(f"lost contact with rank 0 {self.where} ({_one_line(error)})")
                    _leave(1)
                self._heard = time.monotonic()
                if self.rank == 0:
                    self._check_beats(beats)

    def _check_beats(self, beats: dict[int, tuple[int, float]]) -> None:
        """For rank 0, whose own process holds the store: find ranks that have fallen silent."""
        for rank, (count, since) in beats.items():
            now = self._news.add(f"beat{rank}", 0)
            if now != count:
                beats[rank] = (now, time.monotonic())
            elif time.monotonic() - since > self._patience:
                self._say(f"lost contact with rank {rank} {self.where}: no sign of it for {self._patience:.0f} s")
                _leave(1)

    def _acknowledge(self) -> None:
        """Rank 0 holds the store and stays until all have read the news, or had the time to."""
        count = self._news.add("acknowledged", 1)
        deadline = time.monotonic() + _GRACE_S
        while self.rank == 0 and count < self.world and time.monotonic() < deadline:
            time.sleep(0.05)
            count = self._news.add("acknowledged", 0)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopping = True

    def _hang_up(self, number: int, frame: FrameType | None) -> None:
        """The terminal is gone: what is written there from now on would be an error, and is for nobody."""
        self.stopping = True
        nobody = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        for descriptor in (1, 2):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                os.dup2(nobody, descriptor)

    def _say(self, what: str) -> None:
        with contextlib.suppress(OSError):  # the terminal may be gone
            print(f"finetune: rank {self.rank} of {self.world}: {what}", file=sys.stderr, flush=True)


def main(arguments: list[str]) -> NoReturn:
    """Run this rank to its end."""
    rank = Rank()
    rank.watch()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    debug = "--debug" in arguments
    try:
        if rank.stopping:
            raise KeyboardInterrupt
        settings = Settings.of_options(parse_command_line(arguments).params, tuple(arguments))
        if settings.profile:
            from cli.inspect.profile_ranks import profile

            profile(settings, rank)
        else:
            from cli.train.nodes import train

            train(settings, rank)
    except (KeyboardInterrupt, Stopped) as stopped:
        rank.end(Outcome(INTERRUPTED, str(stopped) or "stopped before training began."))
    except FinetuneError as error:
        if debug:
            traceback.print_exc()
        notes = getattr(error, "__notes__", [])
        rank.end(Outcome(error.exit_status, " ".join([str(error) + _found_by(rank), *notes])))
    except Exception as error:
        if debug:
            traceback.print_exc()
        if _is_lost_contact(error):
            rank.lose(_one_line(error))
        notes = [] if debug else ["Run again with --debug for the traceback."]
        if type(error).__name__ == "OutOfMemoryError":
            notes = ["A smaller --micro-batch, a lower --device-cache-threshold or more ranks take less memory."]
        message = f"{type(error).__name__}: {_one_line(error)}.{_found_by(rank)}"
        rank.end(Outcome(1, " ".join([message, *notes, *getattr(error, "__notes__", [])])))
    rank.end(Outcome(0))


def _found_by(rank: Rank) -> str:
    nodes = rank.world // int(os.environ["LOCAL_WORLD_SIZE"])
    return f" (Rank {rank.rank} on {socket.gethostname()} found this.)" if nodes > 1 else ""


def _is_lost_contact(error: BaseException) -> bool:
    """Whether a collective failed because of the network or another rank, not because of what it was given."""
    import torch.distributed as dist

    if isinstance(error, dist.DistError | ConnectionError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "Connection", "Timed out"))


def _one_line(error: BaseException) -> str:
    """What libraries say, without where in their sources they say it, and shortened."""
    text = " ".join(str(error).split()).removesuffix(".") or type(error).__name__
    if text.startswith("["):  # gloo: [file:line] what [peer]. Advice.
        text = text.partition("] ")[2].partition(". ")[0]
    return text if len(text) <= 300 else text[:300] + " ..."


def _leave(status: int) -> NoReturn:
    """End the process without the destructors of libraries, which may wait for, or trip over, what is broken."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
