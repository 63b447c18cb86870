"""What ranks do in the tests of the out-of-core engine over a process group."""

import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fcdp
import fuyou
from common.errors import FinetuneError
from common.store import commit_manifest, load_manifest
from fuyou.runtime.data_plane import rank_handlers as handlers
from fuyou.runtime.device import CudaDevice, Device
from tests.helpers.accelerator import QueuedDevice
from tests.helpers.engines import give_buffers
from tests.helpers.fcdp.recorder import Launch, recorded
from tests.helpers.own_loss import dpo
from tests.helpers.own_loss import pairs as preferences

VOCABULARY = 67
OPTIONS = {"dtype": "bf16", "lr": 1e-3, "weight_decay": 0.1, "host_memory": "4GiB"}


@dataclass(frozen=True)
class Run:
    """One run, or a part of one."""

    model: str
    folder: Path
    """Has a folder for each rank, with one for each SSD."""
    steps: int = 5
    rows: int = 4
    """Of all ranks together."""
    packed: bool = True
    """Whether rows hold two documents."""
    ssds: int = 1
    save: Path | None = None
    """Steps in whose last sequence token 0 is, which no other one has."""
    leave: tuple[tuple[int, int], ...] = ()
    """Directories of other ranks, before: which rank has to look at which rank's."""
    options: dict[str, Any] = field(default_factory=dict)
    in_one_order: bool = False
    """Whether exchanges are launched as NCCL wants it."""


@dataclass
class Outcome:
    first: int
    """Step that it began after."""
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    masters: dict[str, torch.Tensor] = field(default_factory=dict)
    planned: tuple[int, int, int] = (0, 0, 0)
    """Of the last step, on this rank: bytes read, written and sent to other nodes."""
    counted: tuple[int, int] = (0, 0)
    """Of all steps: bytes that the stores have counted, read and written."""
    scheduled: tuple[int, int] = (0, 0)
    """What the schedule says that these come to."""
    kept: int = 0
    """Bytes of operator outputs that there is room for."""
    pieces: int = 1
    """Number of pieces of the block that has most."""
    launches: list[Launch] = field(default_factory=list)
    """Collectives of the run, in order."""


def batch(step: int, rows: int) -> dict[str, torch.Tensor]:
    """Two documents in each row, with unequal numbers of labels."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(1, VOCABULARY, (rows, 12), generator=generator)
    labels = ids.clone()
    labels[:, 0] = labels[:, 4] = -100
    labels[1, 5:] = -100
    positions = torch.cat([torch.arange(4), torch.arange(8)]).repeat(rows, 1)
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def directories(folder: Path, rank: int, count: int) -> list[Path]:
    """One for each SSD of a rank, made if they are not there."""
    result = [folder / f"rank{rank}" / f"ssd{number}" for number in range(count)]
    for path in result:
        path.mkdir(parents=True, exist_ok=True)
    return result


def train(topology: fcdp.Topology | None, run: Run) -> Outcome:
    """All ``run.steps``, on every rank its rows of each batch; a single rank without a topology takes all."""
    rank, world = (topology.rank, topology.world_size) if topology is not None else (0, 1)
    ssd = directories(run.folder, rank, run.ssds)
    leave = [
        path for by, whose in run.leave if by == rank for path in directories(run.folder, whose, run.ssds)
    ]
    options = {**OPTIONS, **run.options}
    kinds = CudaDevice.in_one_order if run.in_one_order else Device.in_one_order
    with (
        mock.patch.object(Device, "in_one_order", kinds),
        recorded() as launches,
        fuyou.Engine(run.model, ssd=ssd, leave_ssd=leave, topology=topology, **options) as engine,
    ):
        mine = slice(rank * run.rows // world, (rank + 1) * run.rows // world)
        pieces = max(len(block) for block in engine._run.layout.blocks)
        outcome = Outcome(engine.step_count, kept=engine.memory_plan.saved_bytes, pieces=pieces)
        for step in range(engine.step_count + 1, run.steps + 1):
            whole = batch(step, run.rows)
            if not run.packed:
                del whole["position_ids"]
            loss = engine(**{name: value[mine] for name, value in whole.items()}).loss
            loss.backward()
            report = engine.step()
            outcome.losses.append(loss.item())
            outcome.norms.append(report.grad_norm)
            outcome.planned = (
                report.planned_read_bytes,
                report.planned_written_bytes,
                report.planned_sent_bytes,
            )
        engine.flush()
        outcome.counted, outcome.scheduled = engine.io_bytes(), engine.planned_io_bytes()
        outcome.masters = dict(engine.named_parameters()) if rank == 0 else dict.fromkeys(
            name for name, _ in engine.named_parameters()
        )  # fmt: skip
        if run.save is not None:
            engine.save_pretrained(run.save)
    outcome.launches = launches
    return outcome


def train_unlike(topology: fcdp.Topology | None, run: Run) -> Outcome:
    """Train on ranks of which the first alone is fast in bf16; in a run that continues, all but the first are."""
    first = topology is None or topology.rank == 0
    fastest = "bf16" if first != run.options.get("resume", False) else "fp32"
    with mock.patch("fuyou.engine.common_decisions.fastest_dtype", return_value=fastest):
        return train(topology, run)


def export(topology: fcdp.Topology | None, run: Run) -> str:
    """What is reported when the weights are exported as they came, and files of the target then; then overridden.

    With adapters, merged as well. Nothing hangs, and the engine can continue.
    """
    rank = topology.rank if topology is not None else 0
    assert run.save is not None
    with fuyou.Engine(
        run.model, ssd=directories(run.folder, rank, 1), topology=topology, **{**OPTIONS, **run.options}
    ) as engine:
        merge, said = "adapters" in run.options, "exported"
        try:
            engine.save_pretrained(run.save, merge=merge)
        except FinetuneError as error:
            left = sorted(str(file.relative_to(run.save)) for file in run.save.rglob("*") if file.is_file())
            said = f"{error} {left}"
        if topology is not None:
            dist.barrier()
        engine.save_pretrained(run.save, merge=merge, allow_nonfinite=True)
    return said


def train_until_a_bit_flips(topology: fcdp.Topology, run: Run, call: int) -> str:
    """The second node receives one wrong bit, in its ``call``-th gather across nodes. Returns what is reported then."""
    gather, calls = handlers.gather, itertools.count(1)

    def faulty(cells: torch.Tensor, *others: Any) -> None:
        gather(cells, *others)
        if next(calls) == call and topology.node == 1:
            cells.view(torch.uint8)[0, 5] ^= 1

    handlers.gather = faulty
    try:
        train(topology, run)
    except FinetuneError as error:
        return str(error)
    finally:
        handlers.gather = gather
    return "nothing"


def set_back(folder: Path, rank: int) -> None:
    """Make a rank's store what it would be, had the rank been killed right before it wrote its last manifest."""
    place = directories(folder, rank, 1)[0] / "fuyou-run"
    content = load_manifest(place)
    assert content is not None
    about = content["cluster"]
    commit_manifest(place, {**about["previous"], "cluster": {**about, "previous": None}})


def train_preferences(topology: fcdp.Topology | None, run: Run) -> Outcome:
    """Train adapters by DPO, each rank on its pairs, of which one has ``run.rows // 2`` in all."""
    rank, world = (topology.rank, topology.world_size) if topology is not None else (0, 1)
    ssd = directories(run.folder, rank, run.ssds)
    options = {**OPTIONS, **run.options}
    outcome = Outcome(0)
    with fuyou.Engine(run.model, ssd=ssd, topology=topology, **options) as engine:
        for whole in preferences(run.steps, run.rows, 12):
            count = run.rows // 2 // world
            chosen = torch.arange(rank * count, (rank + 1) * count)
            mine = torch.cat([chosen, chosen + run.rows // 2])
            batch = {name: value[mine].clamp(max=VOCABULARY - 1) for name, value in whole.items()}
            out = engine.tokens(**batch, reference=True)
            assert out.reference is not None
            engine.backward(dpo({"log_probs": out.log_probs}, out.reference.log_probs) / world)
            report = engine.step()
            outcome.losses.append(report.loss)
            outcome.norms.append(report.grad_norm)
        engine.flush()
        outcome.counted, outcome.scheduled = engine.io_bytes(), engine.planned_io_bytes()
        outcome.masters = dict(engine.named_parameters())
    return outcome


def train_past_host(topology: fcdp.Topology | None, run: Run, counts: dict[str, int]) -> tuple[Outcome, int]:
    """Train on a processor that plays a GPU with GPUDirect Storage. Return also how often drives have read into it."""
    with pytest.MonkeyPatch.context() as patch:
        device = QueuedDevice(protects=False).install(patch)  # gloo reads what NCCL would
        device.install_kvikio(patch)
        give_buffers(patch, counts)
        outcome = train(topology, run)
    return outcome, len(device.past_host)


def train_routed(topology: fcdp.Topology | None, run: Run) -> Outcome:
    """Train a model some of whose experts no token is sent to."""
    from tests.helpers.models import routed  # noqa: F401 - so that this process knows the family

    return train(topology, replace(run, packed=False))
