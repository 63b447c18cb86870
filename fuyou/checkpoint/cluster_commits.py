"""Commits of several ranks: a step counts once the manifest of every rank lists it.

Writes of step t + 1 overwrite step t - 1 and wait until *all* ranks have committed t. So the newest step of any two
ranks differ by one commit at most, and ranks that are ahead still have the previous one, whole, in the other slot; its
manifest describes both. On resume all ranks take the newest step that all of them have.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from common.errors import FinetuneError, UserError
from common.store import Store, StoreError, load_manifest
from fuyou.checkpoint.commits import CLUSTER, Commits, TrainingState, check_records, check_state
from fuyou.layout.share import Share
from fuyou.runtime.ranks.agreement import Agreement, host, rank_name
from fuyou.schedule.tasks import Task


class ClusterCommits(Commits):
    """Commits of one rank among several, which agree on every step before it counts.

    Args:
        run: random name of the run, equal on every rank.
        checksum: returns a checksum of the parameters that this rank stores, as they are after a step.
    """

    def __init__(self, agreement: Agreement, run: str, checksum: Callable[[int], int], *arguments: Any):
        super().__init__(*arguments)
        self._agreement, self._run, self._checksum = agreement, run, checksum
        self._previous: TrainingState | None = None

    def _make_durable(self, task: Task) -> None:
        self._compare(task.step)
        self._previous = self.state
        super()._make_durable(task)
        self._agreement.all_gather_at_commit(task.step)

    def _compare(self, step: int) -> None:
        """Check that all nodes, which hold copies of the same parameters, hold the same after ``step``."""
        share = self._agreement.share
        checksums: list[tuple[str, int]] = self._agreement.all_gather_at_commit((host(), self._checksum(step)))
        for rank, (name, checksum) in enumerate(checksums):
            first = rank % share.ranks_per_node  # the rank in the same place of node 0
            if checksum != checksums[first][1]:
                raise FinetuneError(
                    f"After step {step}, {rank_name(share, rank, name)} and "
                    f"{rank_name(share, first, checksums[first][0])} hold different parameters (their checksums "
                    "differ): memory or network of one of them has failed. "
                    f"The step is not committed; step {self.committed_step} is, on all nodes."
                )

    def _content(self) -> dict[str, Any]:
        previous = self._previous.to_dict() if self._previous is not None and self._previous.slots > 1 else None
        return {**super()._content(), CLUSTER: cluster_content(self._run, self._agreement.share, previous)}


def cluster_content(run: str, share: Share, previous: dict[str, Any] | None) -> dict[str, Any]:
    """Return what a rank's manifest says of the others, as JSON.

    Args:
        run: random name of the run.
        previous: the committed state before; None if that is not whole any more.
    """
    return {
        "run": run,
        "nodes": share.nodes,
        "ranks_per_node": share.ranks_per_node,
        "rank": share.rank,
        "previous": previous,
    }


@dataclass(frozen=True)
class LocalCommit:
    """What one rank has found in its store, or why it has found nothing."""

    host: str
    problem: str = ""
    run: str = ""
    nodes: int = 0
    ranks_per_node: int = 0
    rank: int = 0  # Rank that the store belongs to
    steps: Sequence[int] = ()  # Steps that it could continue from, newest first


def find_common_state(
    agreement: Agreement, open_store: Callable[[], Store], expected: TrainingState
) -> tuple[Store, TrainingState, str]:
    """Open this rank's store, and find the newest step that all ranks have. Collective.

    Returns:
        The store, its state after that step, and the run's name.

    Raises:
        UserError, StoreError: on every rank alike; says which node lacks what, or what is damaged where.
    """
    share, store = agreement.share, None
    states: list[TrainingState] = []
    failure: Exception | None = None
    try:
        store = open_store()
        content = load_manifest(store.directories[0])
        cluster = content.pop(CLUSTER, None) if content is not None else None
        if content is not None and cluster is None:
            raise UserError(f"The run in {store.directories[0]} was made by a single rank, not by {share.world_size}.")
        states.append(check_state(store, content, expected))
        assert cluster is not None
        if cluster["previous"] is not None:
            states.append(check_state(store, cluster["previous"], expected))
        steps = tuple(state.step for state in states)
        local = LocalCommit(
            host(), "", cluster["run"], cluster["nodes"], cluster["ranks_per_node"], cluster["rank"], steps
        )
    except FinetuneError as error:
        local = LocalCommit(host(), str(error))
    except Exception as error:  # not foreseen: the others must not wait for us
        local, failure = LocalCommit(host(), f"{type(error).__name__}: {error}"), error
    everyone = [LocalCommit(**content) for content in agreement.all_gather_object(asdict(local))]
    try:
        if failure is not None:
            raise failure
        step = agreed_step(everyone, share)
    except BaseException:
        if store is not None:
            store.close()
        raise
    assert store is not None
    state, damage = next(state for state in states if state.step == step), ""
    try:
        check_records(store, state)
    except FinetuneError as error:
        damage = f"{host()}: {error}"
    except Exception as error:
        damage, failure = f"{host()}: {type(error).__name__}: {error}", error
    damaged: list[str] = agreement.all_gather_object(damage)
    if any(damaged):
        store.close()
        if failure is not None:
            raise failure
        raise StoreError(" ".join(filter(None, damaged)))
    return store, state, local.run


def agreed_step(everyone: Sequence[LocalCommit], share: Share) -> int:
    """Return the newest step that all ranks have.

    Raises:
        UserError: if there is none, or the stores are not those of all ranks of one run, in order.
    """
    names = [rank_name(share, rank, held.host) for rank, held in enumerate(everyone)]
    problems = [f"{name}: {held.problem}" for name, held in zip(names, everyone, strict=True) if held.problem]
    if problems:
        if len(problems) == len(everyone):
            raise UserError(f"There is nothing to continue. {problems[0]}")
        raise UserError(
            "Not all nodes can continue the run, and each holds a part of its optimizer states that no other has. "
            + " ".join(problems)
        )
    runs: dict[str, list[str]] = {}
    for name, held in zip(names, everyone, strict=True):
        runs.setdefault(held.run, []).append(name)
    if len(runs) > 1:
        described = "; ".join(f"run {run[:8]} on {', '.join(where)}" for run, where in runs.items())
        raise UserError(f"The nodes hold parts of different runs: {described}. Give --ssd the directories of one run.")
    first = everyone[0]
    if (first.nodes, first.ranks_per_node) != (share.nodes, share.ranks_per_node):
        raise UserError(
            f"The drives hold what {first.nodes} nodes with {first.ranks_per_node} ranks each have made, and now there "
            f"are {share.nodes} x {share.ranks_per_node}: start as many as before."
        )
    for rank, (name, held) in enumerate(zip(names, everyone, strict=True)):
        if held.rank != rank:
            raise UserError(
                f"{name} holds what rank {held.rank} of this run has made, and is rank {rank} now. Start the nodes in "
                "the order in which they began (--ssd must name this node's own directories)."
            )
    return common_step([(name, held.steps) for name, held in zip(names, everyone, strict=True)])


def common_step(held: Sequence[tuple[str, Sequence[int]]]) -> int:
    """Return the newest step that all ranks have.

    Args:
        held: the name of each rank, and its steps, newest first.

    Raises:
        UserError: if there is none.
    """
    step = min(steps[0] for _, steps in held)
    lacking = [f"{name} has {' and '.join(map(str, steps))}" for name, steps in held if step not in steps]
    if lacking:
        holders = ", ".join(name for name, steps in held if steps[0] == step)
        raise UserError(
            f"No step is on all nodes: {holders} has only steps up to {step}, and {'; '.join(lacking)}. "
            "One of them has come back with older drives, or with a copy of them: give it its newest ones."
        )
    return step
