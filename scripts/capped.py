"""Run a command under a real memory limit: the kernel's, not a promise.

    python scripts/capped.py --memory 4GiB -- finetune --model llama-1.3b --data random --steps 2

Puts the command into a separate memory control group (version 1 or 2, whichever the machine has; needs root)
without swap. The limit covers all the command's processes together: private and shared memory, page cache and kernel
memory; page cache yields under pressure, the rest does not, and beyond the limit the kernel kills. Signals go through
to the command, and its exit status comes back (128 + N if signal N ended it). What was used at most, and whether the
kernel killed, is printed on stderr at the end. 125 is the exit status where the group cannot be made, 126 and 127 where
the command cannot be run.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from common.errors import UserError
from common.memory.cgroups import ControlGroup, own_groups
from common.units import format_bytes, parse_bytes

# Exit statuses of our own, as ``env`` and ``timeout`` use them
CANNOT_CAP, CANNOT_EXECUTE, NOT_FOUND = 125, 126, 127

PASSED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
SENT_BY_KERNEL = 0x80
"""``si_code`` of what a terminal sends: it goes to its whole foreground group, so the command has it already."""

LOOK_EVERY_S = 0.05
LEFT_BEHIND_GRACE_S = 2.0
"""How long processes may outlive the command that started them before they count as left behind."""


class CannotCapError(UserError):
    """No memory control group can be made or entered here."""


class CappedGroup(ControlGroup):
    """A group whose use of memory is measured."""

    def memory_peak(self) -> int | None:
        """Return the most bytes ever charged to this group, page cache included; None where it is not recorded."""
        return self._number("memory.peak" if self.version == 2 else "memory.max_usage_in_bytes")

    def memory_unreclaimable(self) -> int:
        """Return the bytes of anonymous and shared memory, which the kernel cannot take back without swap."""
        stat = self._table("memory.stat")
        anonymous, shared = ("anon", "shmem") if self.version == 2 else ("total_rss", "total_shmem")
        return stat.get(anonymous, 0) + stat.get(shared, 0)

    def out_of_memory_kills(self) -> int:
        """Return how many processes of this group the kernel has killed because the group had reached its limit."""
        return self._table("memory.events" if self.version == 2 else "memory.oom_control").get("oom_kill", 0)


@dataclass
class Outcome:
    """What became of the command."""

    exit_status: int
    peak_bytes: int | None
    """Most memory charged to the group, page cache included; None where the kernel does not record it."""
    unreclaimable_bytes: int  # Most private and shared memory seen, 20 times a second
    kills: int  # Processes that the kernel killed at the limit
    left_behind: int  # Processes still there after the command had ended; ended by us


def make_group(limit: int) -> CappedGroup:
    """A new memory control group that allows ``limit`` bytes and no swap.

    Version 1: below our own group. Version 2 allows processes at the leaves only, so there it goes below our nearest
    ancestor that hands the memory controller down.

    Raises:
        CannotCapError: no control groups, or no right to make one.
    """
    groups = own_groups("memory")
    if not groups:
        raise CannotCapError(
            "This machine has no memory control groups mounted (/sys/fs/cgroup), so nothing can be capped."
        )
    if groups[0].version == 2:
        groups = [group for group in groups if "memory" in _words(group.path / "cgroup.subtree_control")]
        if not groups:
            raise CannotCapError(
                "No control group above this process hands the memory controller down, as is usual inside a container. "
                "Cap from outside instead: `systemd-run --scope -p MemoryMax=4G -p MemorySwapMax=0 COMMAND`, "
                "or `docker run --memory 4g --memory-swap 4g`."
            )
    group = CappedGroup(groups[0].path / f"capped-{os.getpid()}", groups[0].version)
    try:
        group.path.mkdir()
    except OSError as error:
        who = "" if os.geteuid() == 0 else " Making control groups takes root: run this with sudo."
        raise CannotCapError(f"Cannot make the control group {group.path}: {error.strerror}.{who}") from error
    try:
        if group.version == 2:
            (group.path / "memory.max").write_text(str(limit))
            _write_if_there(group.path / "memory.swap.max", "0")
        else:
            (group.path / "memory.limit_in_bytes").write_text(str(limit))
            _write_if_there(group.path / "memory.memsw.limit_in_bytes", str(limit))
    except OSError as error:
        group.path.rmdir()
        raise CannotCapError(f"Cannot limit {group.path} to {limit} bytes: {error.strerror}.") from error
    return group


def run_in(group: CappedGroup, command: Sequence[str]) -> Outcome:
    """Run ``command`` in ``group`` to its end, then end what it left behind.

    Raises:
        FileNotFoundError, PermissionError: the command cannot be run.
        CannotCapError: no right to move a process into the group.
    """
    # Signals are taken one by one below; the command must not inherit that they are blocked.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON | {signal.SIGCHLD})

    def enter() -> None:
        (group.path / "cgroup.procs").write_text(str(os.getpid()))
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    try:
        process = subprocess.Popen(command, preexec_fn=enter)
        unreclaimable = 0
        while process.poll() is None:
            unreclaimable = max(unreclaimable, group.memory_unreclaimable())
            news = signal.sigtimedwait(PASSED_ON | {signal.SIGCHLD}, LOOK_EVERY_S)
            if news and news.si_signo != signal.SIGCHLD and news.si_code != SENT_BY_KERNEL:
                process.send_signal(news.si_signo)
    except subprocess.SubprocessError as error:
        raise CannotCapError(
            f"Cannot move a process into {group.path}: its cgroup.procs cannot be written."
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    left_behind = _end_what_is_left(group)
    status = process.returncode if process.returncode >= 0 else 128 - process.returncode
    return Outcome(status, group.memory_peak(), unreclaimable, group.out_of_memory_kills(), left_behind)


def _end_what_is_left(group: ControlGroup) -> int:
    deadline = time.monotonic() + LEFT_BEHIND_GRACE_S
    while (pids := _words(group.path / "cgroup.procs")) and time.monotonic() < deadline:
        time.sleep(0.01)
    left_behind = len(pids)
    while pids:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.01)
        pids = _words(group.path / "cgroup.procs")
    return left_behind


def remove_group(group: ControlGroup) -> None:
    """Remove an empty group; the last process's exit may take the kernel a moment to book."""
    for attempt in range(100):
        try:
            group.path.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.001 * attempt)
    print(f"capped: could not remove {group.path}; remove it with rmdir.", file=sys.stderr)


def describe(outcome: Outcome, limit: int) -> str:
    """The closing line."""
    peak = "an unrecorded amount" if outcome.peak_bytes is None else format_bytes(outcome.peak_bytes)
    sampled = format_bytes(outcome.unreclaimable_bytes)
    killed = f"the kernel KILLED {outcome.kills} at the limit" if outcome.kills else "nothing was killed"
    left = f"; processes left behind, and ended: {outcome.left_behind}" if outcome.left_behind else ""
    return (
        f"capped: used at most {peak} of {format_bytes(limit)} with page cache, {sampled} without (sampled); "
        f"{killed}; exit status {outcome.exit_status}{left}."
    )


def _words(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def _write_if_there(path: Path, text: str) -> None:
    """Swap control is a build option of the kernel."""
    if path.exists():
        path.write_text(text)


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}, help=__doc__
)
@click.option(
    "--memory", required=True, metavar="SIZE", help="The limit: 4GiB, 512MiB, or a number of bytes."
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def main(memory: str, command: tuple[str, ...]) -> None:
    try:
        limit = parse_bytes(memory)
        group = make_group(limit)
        try:
            outcome = run_in(group, command)
        finally:
            remove_group(group)
    except UserError as error:
        print(f"capped: {error}", file=sys.stderr)
        sys.exit(CANNOT_CAP)
    except OSError as error:
        print(f"capped: cannot run {command[0]}: {error.strerror}.", file=sys.stderr)
        sys.exit(NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_EXECUTE)
    print(describe(outcome, limit), file=sys.stderr)
    sys.exit(outcome.exit_status)


if __name__ == "__main__":
    main()
