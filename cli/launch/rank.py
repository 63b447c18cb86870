"""The entry point of a rank of ``finetune --nodes``, which the launcher starts: reads the same command line."""

import socket
import sys
import traceback
from typing import NoReturn

from cli.job.resumed import decided
from cli.launch.launcher import INTERRUPTED
from cli.options.command import parse_command_line
from cli.options.settings import Settings
from cli.report.heartbeat import Heartbeat
from cli.train.interrupts import Stopped
from cli.train.ranks.liveness import RankProcess, one_line
from cli.train.ranks.outcomes import Outcome
from common.errors import FinetuneError


def main(arguments: list[str]) -> NoReturn:
    """Run this rank to its end."""
    rank = RankProcess()
    rank.watch()
    FinetuneError.names_flags = True
    debug = "--debug" in arguments
    if rank.is_rank0:
        Heartbeat().__enter__()  # until this process ends, by whichever of its threads
    try:
        if rank.stopping:
            raise KeyboardInterrupt
        settings = decided(Settings.of_options(parse_command_line(arguments).params, tuple(arguments)))
        if settings.profile:
            from cli.inspect.profile_cluster import profile

            profile(settings, rank)
        else:
            from cli.train.ranks.run import train_rank

            train_rank(settings, rank)
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
            rank.lose(one_line(error))
        notes = [] if debug else ["Run again with --debug for the traceback."]
        if type(error).__name__ == "OutOfMemoryError":
            notes = ["A smaller --micro-batch, a lower --device-cache-threshold or more ranks take less memory."]
        message = f"{type(error).__name__}: {one_line(error)}.{_found_by(rank)}"
        rank.end(Outcome(1, " ".join([message, *notes, *getattr(error, "__notes__", [])])))
    rank.end(Outcome(0))


def _found_by(rank: RankProcess) -> str:
    """Return which rank found an error, where there are several nodes."""
    return f" (Rank {rank.rank} on {socket.gethostname()} found this.)" if rank.nodes > 1 else ""


def _is_lost_contact(error: BaseException) -> bool:
    """Return whether a collective failed because of the network or another rank, not because of its arguments."""
    import torch.distributed as dist

    if isinstance(error, dist.DistError | ConnectionError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "Connection", "Timed out"))


if __name__ == "__main__":
    main(sys.argv[1:])
