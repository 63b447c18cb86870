"""Ranks that train out of core together, each on its own drives, cut short at one call and continued.

The other ranks are forked from the first one, so that all are in one process group and a run takes about a second.
"""

import hashlib
import os
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

import fuyou
from common.communication import all_gather_object
from common.data import RandomBatches
from common.errors import FinetuneError
from fcdp.strategy.topology import Topology
from tests.helpers.crash.drives import Fault, count
from tests.helpers.crash.points import Reference, carry_on, check, clean, files_in, interrupt
from tests.helpers.crash.runs import ROWS, SEQ_LEN, VOCABULARY, Outcome, Run, digests, execute, tiny_config

COLLECTIVE_SECONDS = 60
"""A rank waits so long for another one."""


@dataclass(frozen=True)
class RanksRun(Run):
    """Of one rank on each node."""

    nodes: int = 2
    before: int = 0
    """Nodes of the run that continues: what those had that are gone is looked for by the first one."""
    kept: tuple[int, ...] = field(default=())
    """Folders, by node, that hold its drives; empty: as they are numbered."""

    @property
    def patience(self) -> float:
        """The first rank plays the launcher, too: if it dies, the others end alone, some seconds later."""
        return 60.0

    def train(self, say: Callable[..., None]) -> None:
        """As the first rank; the others are its children, and tell errors only."""
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        children, first = [], os.getpid()
        for node in range(1, self.nodes):
            child = os.fork()
            if child:
                children.append(child)
                continue
            threading.Thread(target=_follow, args=(first,), daemon=True).start()
            try:
                _train(self, node, lambda **entry: None)
            except FinetuneError as error:  # all ranks have it alike, or the first one hears nothing of it
                say(error=str(error), expected=True)
                os._exit(1)
            except BaseException:  # the first one is gone
                os._exit(1)
            os._exit(0)
        watch = threading.Thread(target=_watch, args=(children,))
        watch.start()
        _train(self, 0, say)
        watch.join()

    @property
    def ssd(self) -> list[Path]:
        """Of all nodes, to be made before anything is counted."""
        return [self.drives_of(node) for node in range(self.nodes)]

    def look(self, engine: fuyou.Engine, node: int) -> None:
        """What each rank does with its engine before it closes it."""

    def drives_of(self, node: int) -> Path:
        """Directory on the drive of a node."""
        return self.root / f"node{self.kept[node] if self.kept else node}"


def _follow(launcher: int) -> None:
    """As a rank does: when its launcher is gone, nobody else will end it. An error that comes first is welcome."""
    while os.getppid() == launcher:
        time.sleep(0.1)
    time.sleep(2)
    os._exit(1)


def _watch(children: list[int]) -> None:
    """As a launcher does: when a rank has failed, the others are ended."""
    statuses = [os.waitpid(child, 0)[1] for child in children]
    if any(statuses):
        time.sleep(2)  # the first one may have something to say
        os.killpg(0, signal.SIGKILL)


def _train(run: RanksRun, node: int, say: Callable[..., None]) -> None:
    warnings.simplefilter("ignore")
    if run.nodes > 1:
        dist.init_process_group(
            "gloo", f"file://{run.notes}/meeting", rank=node, world_size=run.nodes,
            timeout=timedelta(seconds=COLLECTIVE_SECONDS),
        )  # fmt: skip
    topology = Topology(run.nodes, 1, device="cpu") if run.nodes > 1 else None
    own = run.drives_of(node)
    gone = [run.root / f"node{other}" for other in range(run.nodes, run.before)] if node == 0 else []
    rows = ROWS // run.nodes
    options = {
        "lr": 1e-2, "host_memory": "2GiB", "micro_batch": 1, "batch_shape": (rows, SEQ_LEN), "dtype": "bf16",
        **run.options,
    }  # fmt: skip
    batches = RandomBatches(VOCABULARY, SEQ_LEN, ROWS, seed=5)
    # Not closed where it fails: its threads may wait for a rank that is no more, and the process ends anyway.
    engine = fuyou.Engine(
        tiny_config("dense"), ssd=[own], leave_ssd=[path for path in gone if path.is_dir()], topology=topology,
        **options,
    )  # fmt: skip
    while engine.step_count < run.steps:
        batch = batches.batch(engine.step_count)
        part = {name: value[rows * node : rows * (node + 1)] for name, value in batch.items()}
        loss = engine(**part).loss
        loss.backward()
        report = engine.step()
        digest = hashlib.sha256(batch["input_ids"].numpy().tobytes()).hexdigest()[:12]
        took = f"{float(loss).hex()} {report.grad_norm.hex()} {digest}"
        say(step=report.step, took=took, committed=engine.committed_step)
    engine.flush()
    masters = {
        name: hashlib.sha256(value.float().numpy().tobytes()).hexdigest()
        for name, value in engine.named_parameters()
    }
    told = [digests(engine)] if topology is None else all_gather_object(digests(engine))
    final = {
        f"node {number}: {what}": value for number, one in enumerate(told) for what, value in one.items()
    }
    run.look(engine, node)
    engine.close()
    say(final={**final, **masters})
    if topology is not None:
        topology.close()
        dist.destroy_process_group()


@dataclass(frozen=True)
class Story:
    """Runs that follow one another; the last one is cut short and continued."""

    earlier: tuple[RanksRun, ...]
    last: RanksRun
    may_be_lost: bool = False
    """Whether a first run may have to begin again: it has got nowhere yet."""
    then: RanksRun | None = None
    """What continues after the crash, if it is not the same again."""

    def under(self, root: Path) -> "Story":
        """The same in a directory."""
        earlier = tuple(replace(run, root=root) for run in self.earlier)
        then = replace(self.then, root=root) if self.then else None
        return replace(self, earlier=earlier, last=replace(self.last, root=root), then=then)


#: By name: a commit of two nodes, and a run that continues with fewer or more; after it, with another number.
BLOCKWISE = {"optimizer": "adamw8bit"}
STORIES = {
    "two nodes": Story((), RanksRun(Path(), {}), may_be_lost=True),
    "two nodes, everything streamed": Story((), RanksRun(Path(), {"host_cache": 0}), may_be_lost=True),
    "two nodes, then one": Story(
        (RanksRun(Path(), steps=1),), RanksRun(Path(), {"resume": True}, nodes=1, before=2, steps=2)
    ),
    "one node, then two, moments in 8 bits": Story(
        (RanksRun(Path(), BLOCKWISE, nodes=1, steps=1),), RanksRun(Path(), {"resume": True, **BLOCKWISE}, steps=2)
    ),
    "one node, then two": Story(
        (RanksRun(Path(), nodes=1, steps=1),), RanksRun(Path(), {"resume": True}, steps=2)
    ),
    "one node, then two, then one": Story(
        (RanksRun(Path(), nodes=1, steps=1),), RanksRun(Path(), {"resume": True}, steps=2),
        then=RanksRun(Path(), {"resume": True}, nodes=1, before=2, steps=2),
    ),
    "two nodes, then one, then two": Story(
        (RanksRun(Path(), steps=1),), RanksRun(Path(), {"resume": True}, nodes=1, before=2, steps=2),
        then=RanksRun(Path(), {"resume": True}, steps=2),
    ),
}  # fmt: skip


def reference(root: Path, story: Story) -> Reference:
    """Without faults. What the earlier runs leave stays next to ``root``."""
    story = story.under(root)
    start = root.with_name(root.name + ".start") if story.earlier else None
    for run in story.earlier:
        before = execute(run)
        assert before.status == 0, before.error
    if start is not None:
        shutil.copytree(root, start)
    outcome = execute(story.last)
    assert outcome.status == 0, outcome.error
    calls = count(story.last.notes)
    if story.then is not None:
        after = execute(story.then)
        assert after.status == 0, after.error
        outcome = replace(outcome, final=after.final)
    found = Reference(outcome, files_in(root), calls, start)
    clean(root)
    return found


def crash(root: Path, story: Story, fault: Fault, expected: Reference, power: int | None = None) -> bool:
    """One crash of the last run and all that must hold after it. Returns whether the fault came before its end.

    Args:
        root: a directory to be made, and removed if all is well.
        power: seed of what a power cut takes with it; None: only processes die.

    Raises:
        AssertionError: something does not hold.
    """
    story = story.under(root)
    if expected.start is not None:
        shutil.copytree(expected.start, root)
    first = interrupt(replace(story.last, fault=fault), expected if story.then is None else None, power)
    if first is None:
        return False
    # Where a run was there before, beginning again would lose it.
    second = carry_on(story.last, first) if story.may_be_lost else execute(story.then or story.last)
    _check(story, first, second, expected)
    left = set(files_in(root)) ^ set(expected.files)
    assert not left, f"files differ: {sorted(left)}"
    clean(root)
    return True


def _check(story: Story, first: Outcome, second: Outcome, expected: Reference) -> None:
    if story.may_be_lost:
        check(first, second, expected, story.last.options)
        return
    assert second.status == 0, f"the run could not be continued: {second.error}"
    assert second.final == expected.outcome.final
    assert min(second.losses, default=story.last.steps + 1) > first.committed, (
        f"step {first.committed} is lost"
    )
    for step, taken in (*first.losses.items(), *second.losses.items()):
        assert set(taken) == set(expected.outcome.losses[step]), f"step {step} differs"
