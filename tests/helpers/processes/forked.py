"""Python commands without their seconds of imports: forked from a process that has imported PyTorch once.

:class:`Popen` takes a command line that begins with this Python and does with it what ``subprocess.Popen`` does, so
that what it starts is a separate process, with descriptors, environment, directory and its own signals. Only the
interpreter and the libraries are there before it begins. One server for each process that asks, started when it first
does; it ends with that one. The one that is forked from it asks the same server.

Not for what looks at a process's memory (pages are shared with the server), at its command line or at its parent.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import io
import os
import pickle
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

ALWAYS = ("torch", "fuyou.optimizer.process.main")
"""What is imported at once."""
FOR_COMMANDS = (
    "transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama", "datasets", "peft",
    "accelerate", "torch.distributed.launcher.api", "torch.distributed.fsdp", "fuyou.engine.engine", "fcdp.trainer",
    "cli.train.engine_trainer", "cli.train.ranks", "cli.launch",
)  # fmt: skip
"""What is imported as soon as a command is to be run that is not the optimizer process."""
_SERVER = "FUYOU_TESTS_SERVER"
"""Environment variable: the server's address."""
_PR_SET_NAME = 15


class Popen(subprocess.Popen[Any]):
    """``subprocess.Popen`` for ``[sys.executable, ...]``.

    Args:
        own_terminal: standard input becomes the controlling terminal of its new session.
    """

    def __init__(self, args: Sequence[Any], *, own_terminal: bool = False, **options: Any):
        assert args[0] == sys.executable, args
        self._own_terminal = own_terminal
        super().__init__(args, **options)

    def _execute_child(self, *given: Any) -> None:
        """Where the interpreter would fork and execute: all else, pipes above all, is as it is there."""
        named = inspect.signature(subprocess.Popen._execute_child).bind(self, *given).arguments  # type: ignore[attr-defined]
        ends = [named[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        fds = [own if end == -1 else end for own, end in enumerate(ends)] + list(named["pass_fds"])
        env, cwd = named["env"], named["cwd"]
        request = {
            "words": [os.fspath(word) for word in named["args"][1:]], "fds": [0, 1, 2, *named["pass_fds"]],
            "env": dict(os.environ if env is None else env),
            "cwd": os.getcwd() if cwd is None else os.fspath(cwd), "session": named["start_new_session"],
            "terminal": self._own_terminal, "group": named["process_group"],
        }  # fmt: skip
        self.pid = self._start(request, fds)
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(named[name] for name in pipes))  # type: ignore[attr-defined]

    def _start(self, request: dict[str, Any], fds: Sequence[int]) -> int:
        request["env"][_SERVER] = address()
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect("\0" + address())
        body = pickle.dumps(request)
        socket.send_fds(self._connection, [len(body).to_bytes(4, "little")], fds)
        self._connection.sendall(body)
        return int.from_bytes(_exactly(self._connection, 4), "little")

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        return self._ended(0.0)

    def _wait(self, timeout: float | None) -> int:
        if self._ended(timeout) is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection, selectors.EVENT_READ)
                if selector.select(timeout):
                    self.returncode = int.from_bytes(_exactly(self._connection, 4), "little", signed=True)
                    self._connection.close()
        return self.returncode


class Child(Popen):
    """Forked from this process itself, which has to be one that was forked: for those that look after their parent, or
    are to have what this process has changed in itself."""

    def __init__(self, args: Sequence[Any], **options: Any):
        self._reaping = threading.Lock()
        super().__init__(args, **options)

    def _start(self, request: dict[str, Any], fds: Sequence[int]) -> int:
        if _SERVER in os.environ:
            request["env"][_SERVER] = os.environ[_SERVER]
        pid = os.fork()
        if not pid:
            _run(request, fds)
        return pid

    def _ended(self, timeout: float | None) -> int | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            with self._reaping:  # threads that wait would take the status from each other
                pid, status = (0, 0) if self.returncode is not None else os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            if self.returncode is None:
                if deadline is not None and time.monotonic() >= deadline:
                    break
                time.sleep(0.002)
        return self.returncode


def as_subprocess(popen: type[Popen] = Popen) -> SimpleNamespace:
    """What a module may find under the name of ``subprocess``."""
    return SimpleNamespace(**{**vars(subprocess), "Popen": popen})


def stand_in(replace: Callable[[Any, str, Any], None], ranks: type[Popen] = Popen) -> None:
    """Have optimizer processes and ranks that this process starts forked; ``replace`` is called as ``setattr`` is."""
    import fuyou.optimizer.process.start

    replace(fuyou.optimizer.process.start, "subprocess", as_subprocess())
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    replace(subprocess_handler, "Popen", ranks)


def run(args: Sequence[Any], *, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` with ``capture_output`` and ``text``."""
    with Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.kill()
    return subprocess.CompletedProcess(args, process.returncode, out, err)


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionError("the server that processes are forked from has ended")
        data += part
    return data


_started: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}
"""By process, as a fork inherits this: its server and that one's address."""


def use(server: str) -> None:
    """Have this process fork from another one's server, of which this is the address."""
    os.environ[_SERVER] = server


def address() -> str:
    """Return that of the server, which is started if there is none."""
    if _SERVER in os.environ:
        return os.environ[_SERVER]
    if os.getpid() not in _started:
        name = f"fuyou-tests-{os.getpid()}"
        server = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.helpers.processes.forked", name], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, env={
                **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "TORCH_CPP_LOG_LEVEL": "FATAL",  # as cli.launch asks for, too late where PyTorch is there
            },
        )  # fmt: skip
        assert server.stdin is not None and server.stdout is not None
        assert server.stdout.readline() == b"ready\n", (
            "the server that processes are forked from did not start"
        )
        _started[os.getpid()] = name, server
    return _started[os.getpid()][0]


def server_pid() -> int | None:
    """Of the server of this process, if it has one."""
    return _started[os.getpid()][1].pid if os.getpid() in _started else None


def close() -> None:
    """End the server of this process, if it has one."""
    _, server = _started.pop(os.getpid(), ("", None))
    if server is not None and server.stdin is not None:
        server.stdin.close()
        server.wait(60)


# -- the server --------------------------------------------------------------------------------------------------------


class _Server:
    """Forks, and tells how those that it has forked have ended."""

    def __init__(self, address: str):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the tests, and they us
        _import(ALWAYS)
        self._waiting: dict[int, socket.socket] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind("\0" + address)
        self._listener.listen(64)
        self._selector = selectors.DefaultSelector()
        woken, wakes = os.pipe2(os.O_NONBLOCK)
        signal.set_wakeup_fd(wakes)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(0, selectors.EVENT_READ, self._end)
        self._selector.register(woken, selectors.EVENT_READ, lambda: os.read(woken, 1 << 10))
        self._selector.register(self._listener, selectors.EVENT_READ, self._serve)

    def serve(self) -> NoReturn:
        """Until the process that has started us is gone."""
        print("ready", flush=True)
        os.dup2(2, 1)
        while True:
            for key, _ in self._selector.select():
                key.data()
            self._reap()

    def _end(self) -> NoReturn:
        os._exit(0)

    def _reap(self) -> None:
        for pid in list(self._waiting):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with self._waiting.pop(pid) as connection, contextlib.suppress(OSError):
                    connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "little", signed=True))

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        try:
            self._fork(connection)
        except (OSError, EOFError):  # the client has been killed meanwhile: all others still need this server
            connection.close()

    def _fork(self, connection: socket.socket) -> None:
        length, received, _, _ = socket.recv_fds(connection, 4, 64)
        request = pickle.loads(_exactly(connection, int.from_bytes(length, "little")))
        if "fuyou.optimizer.process.main" not in request["words"]:
            _import(FOR_COMMANDS)
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            _run(request, received)
        for fd in received:
            os.close(fd)
        self._waiting[pid] = connection  # even if nobody is left to notify
        connection.sendall(pid.to_bytes(4, "little"))


def _import(names: Sequence[str]) -> None:
    for name in names:
        importlib.import_module(name)
    gc.freeze()  # nobody who is forked looks for garbage in it, which would copy every page


def _run(request: dict[str, Any], received: Sequence[int]) -> NoReturn:
    """What the forked process does."""
    status = 1
    try:
        _settle(request, received)
        status = _status(lambda: execute(request["words"]))
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _settle(request: dict[str, Any], received: Sequence[int]) -> None:
    """Be as a process is that has just been started."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if request["session"]:
        os.setsid()
    if request["group"] != -1:
        os.setpgid(0, request["group"])
    # They are put above all before each gets the number that it is to have, which may be anyone's number here.
    above = max(*request["fds"], *received) + 1
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in received]
    os.closerange(0, above)
    for fd, number in zip(high, request["fds"], strict=True):
        os.dup2(fd, number)
    os.closerange(above, os.sysconf("SC_OPEN_MAX"))
    if request["terminal"]:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # Not what the heartbeat of a process that is forked writes to.
    sys.stdout, sys.stderr = (getattr(stream, "_stream", stream) for stream in (sys.stdout, sys.stderr))
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=stream is sys.stderr or stream.isatty())
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if "RANK" in os.environ:  # the command line does not tell
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"rank {os.environ['RANK']}".encode())
    tempfile.tempdir = None
    if "cli.launch" in sys.modules:
        stand_in(setattr, Child)
    import torch

    with contextlib.suppress(KeyError, ValueError):  # OpenMP ignores what is no number
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def execute(words: list[str]) -> None:
    """Run Python's command line."""
    # A module that is to be run may have been imported before
    warnings.simplefilter("ignore", RuntimeWarning)
    options = []
    while words[0] in ("-P", "-u"):
        options.append(words.pop(0))
    given = [
        path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path
    ]
    here = given if "-P" in options else [os.getcwd(), *given]
    if words[0] == "-m":
        sys.argv, sys.path[:0] = words[1:], here
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv, sys.path[:0] = ["-c", *words[2:]], here
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv, sys.path[:0] = words, [os.path.dirname(os.path.abspath(words[0])), *given]
        runpy.run_path(words[0], run_name="__main__")


def _status(work: Callable[[], None]) -> int:
    """With which Python would exit."""
    try:
        work()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    _Server(sys.argv[1]).serve()
