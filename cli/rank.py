"""One rank of ``finetune --nodes``, started by the launcher: reads the same command line and trains its part.

However a rank ends, it says so once and nothing hangs. While the main thread may wait inside a collective that will
never complete, a second thread watches: for an ending that another rank has announced, for the launcher's order to end,
and for a launcher or a rank 0 that is gone.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from cli.interrupts import Stopped
from cli.launch import INTERRUPTED, OUTCOMES, STOP, Outcome
from cli.options import build_command
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
        folder, place = Path(os.environ[OUTCOMES]), os.environ["LOCAL_RANK"]
        self._outcome = folder / f"{place}.json"
        self._outcome.unlink(missing_ok=True)  # of an earlier start
        starts = folder / f"{place}.starts"
        self.restarts = len(starts.read_bytes()) if starts.exists() else 0
        """How often this launcher has started the rank before. (The agent does not count what others caused.)"""
        starts.write_bytes(b"." * (self.restarts + 1))
        self.stopping = STOP in os.environ
        """The user wants this run to stop."""
        self.where = "before the first step"
        """For messages."""
        self._news: Any = None
        self._closing = False
        self._lock = threading.Lock()
        self._launcher = os.getppid()

    def watch(self) -> None:
        """Begin to watch. Signals are dealt with from here on."""
        signal.signal(signal.SIGINT, self._stop)
        # The launcher's SIGTERM must be heard while the main thread is inside a collective.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def connect(self, news: Any) -> None:
        """Hear, and tell, what happens to others, by way of a store client that nobody else uses."""
        self._news = news

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
        outcome.leave(self._outcome)
        _leave(0)

    def lose(self, reason: str) -> NoReturn:
        """Another rank is lost, and so is this start of the run; unless an ending has been announced."""
        time.sleep(_GRACE_S)  # the other thread ends this process if there is news
        self._say(f"lost contact with another rank {self.where} ({reason})")
        _leave(1)

    def _watch(self) -> None:
        missing = 0.0
        while True:
            if signal.sigtimedwait({signal.SIGTERM}, _LOOK_EVERY_S) is not None:
                self._say(f"ended {self.where} by its launcher, as another rank was lost")
                _leave(1)
            if os.getppid() != self._launcher:
                self._say(f"ended {self.where}: its launcher is gone")
                _leave(1)
            with self._lock:
                if self._news is None or self._closing:
                    continue
                try:
                    if self._news.check([_ENDING]):
                        outcome = Outcome(*json.loads(self._news.get(_ENDING)))
                        self._acknowledge()
                        outcome.leave(self._outcome)
                        _leave(0)
                    missing = 0.0
                except Exception as error:
                    missing = missing or time.monotonic()
                    if time.monotonic() - missing > 2 * _GRACE_S:
                        self._say(f"lost contact with rank 0 {self.where} ({_one_line(error)})")
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

    def _say(self, what: str) -> None:
        print(f"finetune: rank {self.rank} of {self.world}: {what}", file=sys.stderr, flush=True)


def main(arguments: list[str]) -> NoReturn:
    """Run this rank to its end."""
    rank = Rank()
    rank.watch()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    parsed: dict[str, Any] = {}
    debug = "--debug" in arguments
    try:
        if rank.stopping:
            raise KeyboardInterrupt
        build_command(lambda **options: parsed.update(options)).main(arguments, standalone_mode=False)
        from cli.main import settings_of
        from cli.train_nodes import train

        train(settings_of(tuple(arguments), parsed), rank)
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
    from torch.distributed.checkpoint import CheckpointException

    if isinstance(error, CheckpointException):
        return any(_is_lost_contact(inner) for inner, _ in error.failures.values())
    if isinstance(error, dist.DistError | ConnectionError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "Connection", "Timed out"))


def _one_line(error: BaseException) -> str:
    """The last and most telling line of what libraries say, shortened."""
    text = " ".join(str(error).split()).removesuffix(".") or type(error).__name__
    text = text.rpartition("] ")[2] if text.startswith("[") else text
    return text if len(text) <= 300 else text[:300] + " ..."


def _leave(status: int) -> NoReturn:
    """End the process without the destructors of libraries, which may wait for, or trip over, what is broken."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
