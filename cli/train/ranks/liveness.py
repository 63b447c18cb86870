"""One rank's process: what it knows about itself and the others, and how it ends.

However a rank ends, it says so once and nothing hangs. While the main thread may wait inside a collective that will
never complete, two others keep watch: one for the launcher's order to end and for a launcher that is gone, the other,
by way of a store that rank 0 holds, for an ending that another rank has announced and for ranks that fall silent.
"""

import contextlib
import json
import os
import signal
import stat
import sys
import threading
import time
from types import FrameType
from typing import Any, NoReturn

from cli.train.ranks.outcomes import Outcome, OwnOutcome
from common.errors import on_one_line

LAUNCH = "FINETUNE_LAUNCH"
"""Environment variable: tells launches apart. Ranks that are started again find it in the commits of their run."""
STOP = "FINETUNE_STOP"
"""Environment variable: set once the user has stopped the run, for ranks that are started after that."""

_LOOK_EVERY_S = 0.3
_GRACE_S = 3.0
"""Time in seconds for news from another rank to arrive before this one says that it has lost contact."""
_ENDING = "ending"


class RankProcess:
    """A rank's process knows its place among the others, and watches over them."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.is_rank0 = self.rank == 0
        """Whether this rank reports for all."""
        self.world_size = int(os.environ["WORLD_SIZE"])
        self._outcome = OwnOutcome()
        self.restarts = self._outcome.restarts
        """How often this launcher has started the rank before."""
        self.stopping = STOP in os.environ
        """Whether the user wants this run to stop."""
        self._where = "before the first step"
        self._news: Any = None
        self._closing = False
        self._patience = self._last_answer_time = 0.0
        self._lock = threading.Lock()
        self._launcher = os.getppid()

    @property
    def node(self) -> int:
        """Number of this rank's node, which the launcher gave it, or :meth:`move`."""
        return int(os.environ["GROUP_RANK"])

    @property
    def nodes(self) -> int:
        """How many nodes there are, as the launcher counts them."""
        return int(os.environ["GROUP_WORLD_SIZE"])

    def move(self, node: int) -> None:
        """Give this rank's node another number, before it connects; rank 0 keeps its own."""
        ranks_per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        self.rank = node * ranks_per_node + self.rank % ranks_per_node
        os.environ.update(RANK=str(self.rank), GROUP_RANK=str(node))  # libraries read them, too

    def enter(self, where: str) -> None:
        """Note how far the run has come, for messages."""
        self._where = where

    def watch(self) -> None:
        """Begin to watch, and to handle signals."""
        signal.signal(signal.SIGINT, self._stop)
        signal.signal(signal.SIGHUP, self._hang_up)
        # The launcher's SIGTERM must be heard while the main thread is inside a collective.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def connect(self, news: Any, patience: float) -> None:
        """Exchange news with the other ranks from now on.

        Args:
            news: a store client that nobody else uses.
            patience: seconds of silence after which a rank counts as lost.
        """
        self._news, self._patience, self._last_answer_time = news, patience, time.monotonic()
        threading.Thread(target=self._listen, name="listen", daemon=True).start()

    def disconnect(self) -> None:
        """Stop exchanging news: all ranks have done their work, and whoever leaves now is not missed."""
        with self._lock:
            self._closing = True

    def end(self, outcome: Outcome) -> NoReturn:
        """End this rank in an orderly way; an error ends all others, too."""
        if outcome.status and self._news is not None:
            try:
                announced = self._news.compare_set(_ENDING, "", json.dumps([outcome.status, outcome.message]))
                outcome = Outcome(*json.loads(announced))
                self._acknowledge()
            except Exception:  # the store is gone, and with it rank 0: nobody is left to tell
                pass
        self._outcome.leave(outcome)
        _leave(0)

    def lose(self, reason: str) -> NoReturn:
        """End this start of the run because another rank is lost, unless an ending has been announced."""
        time.sleep(_GRACE_S)  # the other thread ends this process if there is news
        self._print(f"lost contact with another rank {self._where} ({reason})")
        _leave(1)

    def _watch(self) -> None:
        """Watch for what must be noticed even while the store does not answer."""
        while True:
            if signal.sigtimedwait({signal.SIGTERM}, _LOOK_EVERY_S) is not None:
                self._print(f"ended {self._where} {'as asked' if self.stopping else 'because another rank was lost'}")
                _leave(1)
            if os.getppid() != self._launcher:
                self._print(f"ended {self._where}: its launcher is gone")
                _leave(1)
            silence = time.monotonic() - self._last_answer_time
            if self._news is not None and not self._closing and silence > self._patience:
                self._print(f"lost contact with rank 0 {self._where}: no answer for {silence:.0f} s")
                _leave(1)

    def _listen(self) -> None:
        """Tell rank 0 that this rank is alive, and look for an ending; a store on a dead network blocks for ever."""
        beats = {rank: (0, time.monotonic()) for rank in range(self.world_size)}
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
                    self._print(f"lost contact with rank 0 {self._where} ({one_line(error)})")
                    _leave(1)
                self._last_answer_time = time.monotonic()
                if self.is_rank0:
                    self._check_beats(beats)

    def _check_beats(self, beats: dict[int, tuple[int, float]]) -> None:
        """Find ranks that have fallen silent, on rank 0, whose own process holds the store."""
        for rank, (count, since) in beats.items():
            now = self._news.add(f"beat{rank}", 0)
            if now != count:
                beats[rank] = (now, time.monotonic())
            elif time.monotonic() - since > self._patience:
                self._print(f"lost contact with rank {rank} {self._where}: no sign of it for {self._patience:.0f} s")
                _leave(1)

    def _acknowledge(self) -> None:
        """Keep rank 0, which holds the store, until all ranks have read the news or had the time to."""
        count = self._news.add("acknowledged", 1)
        deadline = time.monotonic() + _GRACE_S
        while self.is_rank0 and count < self.world_size and time.monotonic() < deadline:
            time.sleep(0.05)
            count = self._news.add("acknowledged", 0)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopping = True

    def _hang_up(self, number: int, frame: FrameType | None) -> None:
        """Stop writing to the terminal, which is gone: that would be an error from now on."""
        self.stopping = True
        nobody = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        for descriptor in (1, 2):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                os.dup2(nobody, descriptor)

    def _print(self, what: str) -> None:
        with contextlib.suppress(OSError):  # the terminal may be gone
            print(f"finetune: rank {self.rank} of {self.world_size}: {what}", file=sys.stderr, flush=True)


def one_line(error: BaseException) -> str:
    """Return what a library's error says on one line, without its place in the sources, and shortened."""
    text = on_one_line(error).removesuffix(".") or type(error).__name__
    if text.startswith("["):  # gloo: [file:line] what [peer]. Advice.
        text = text.partition("] ")[2].partition(". ")[0]
    return text if len(text) <= 300 else text[:300] + " ..."


def _leave(status: int) -> NoReturn:
    """End the process without the destructors of libraries, which may wait for, or trip over, what is broken."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
