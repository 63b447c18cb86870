"""The optimizer process: reads optimizer states, updates, and writes back, all three at the same time.

A separate process has its own interpreter lock and thread pool, so that it does not slow the engine's launch loop. The
engine starts it as ``python -m fuyou.optimizer.process.main FD``.
"""

import signal
import sys
import threading

import torch

from fuyou.optimizer.process.protocol import EnginePipe, Ready
from fuyou.optimizer.process.updater import RecordUpdater


def main(pipe_fd: int) -> None:
    """Report the start, receive the set-up, and serve until the engine closes the pipe."""
    # The engine ends this process by SIGTERM, which a rank of several blocks, and what is blocked is inherited.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    # Ctrl-C reaches the whole group; the engine decides what it means
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = EnginePipe(pipe_fd)
    try:
        pipe.send(Ready())
        threading.Thread(target=pipe.send_heartbeats, name="alive", daemon=True).start()
        setup, shared_fd, locks = pipe.receive()
        pipe.receive_locks(locks)
        torch.set_num_threads(setup.threads)
        RecordUpdater(setup, pipe, shared_fd).run()
    except EOFError:
        pass  # closed before it began
    except BaseException as error:
        pipe.report(error)
        sys.exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
