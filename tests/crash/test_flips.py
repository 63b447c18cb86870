"""Flipped bits in committed records of running engines: each that is read is noticed before its use."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import fuyou
from common.errors import FinetuneError
from common.models.adapters.options import ALL_LINEAR, AdapterOptions
from common.store.posix import Bytes, PosixFile
from fuyou.checkpoint.run_files import find_runs, verify_run
from fuyou.schedule import memory_plan
from tests.helpers.crash.ranks import RanksRun
from tests.helpers.crash.runs import digests, execute
from tests.helpers.engines import SCARCE, batches, give_buffers, train
from tests.helpers.flips import flip, flip_pages, flip_what_will_be_written, pages
from tests.helpers.twin import tiny_configs

ADAPTERS = AdapterOptions(4, targets=(ALL_LINEAR,))


def opened(root: Path, family: str, **options: Any) -> fuyou.Engine:
    """Return a small engine that streams everything from two drives."""
    drives = [root / "ssd0", root / "ssd1"]
    for path in drives:
        path.mkdir(exist_ok=True, parents=True)
    torch.manual_seed(0)  # of the first weights
    usual = {"host_memory": "600MiB", "host_cache": 0, "batch_shape": (4, 32), "lr": 1e-3, "prove": False}
    return fuyou.Engine(tiny_configs()[family], ssd=drives, **{**usual, **options})


def train_and_commit(engine: fuyou.Engine, feed: list[dict[str, torch.Tensor]]) -> None:
    """Take a step for each batch, and wait for the updates, which continue after ``step()`` returns."""
    train(engine, feed)
    engine.flush()


def test_no_other_code_reads_what_it_does_not_check() -> None:
    """``Store.read`` takes extents with checksums only. Without them, damage is looked for, and drives are measured."""
    root = Path(fuyou.__file__).parents[1]
    sources = [
        file for folder in ("cli", "common", "fcdp", "fuyou") for file in (root / folder).rglob("*.py")
    ]
    uses = {str(file.relative_to(root)): file.read_text().count("read_unchecked") for file in sources}
    assert {name: count for name, count in uses.items() if count} == {
        "common/store/store.py": 2,  # its definition, and what verifies
        "fuyou/planner/profiling/measure.py": 1,
    }


def test_flips_that_training_and_an_export_read(tmp_path: Path) -> None:
    with opened(tmp_path, "llama", dtype="bf16") as engine:
        train_and_commit(engine, batches(2, packed=False))
        counts = flip_pages(engine, every=5)
    assert counts["trained: noticed"] > 30 and counts["exported: noticed"] > 10


def test_a_flip_in_activations_that_overflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_buffers(monkeypatch, SCARCE)
    write = PosixFile.write

    def write_and_flip(file: PosixFile, offset: int, view: Bytes) -> None:
        write(file, offset, view)
        if file.path.name == "activations":
            flip(file.path, offset)

    monkeypatch.setattr(PosixFile, "write", write_and_flip)
    with opened(tmp_path, "llama", dtype="bf16", micro_batch=1) as engine:
        with pytest.raises(
            FinetuneError, match=r"overflow of activations is damaged: .*/activations are not"
        ):
            train(engine, batches(1, packed=False))
        assert engine.committed_step == 0


CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "full, states in chunks": ("llama", {"dtype": "bf16"}),
    "full, fp32": ("llama", {"dtype": "fp32"}),
    "8-bit moments": ("llama", {"dtype": "bf16", "optimizer": "adamw8bit"}),
    "LoRA": ("llama", {"dtype": "bf16", "adapters": ADAPTERS}),
    "LoRA, nf4": ("llama", {"dtype": "bf16", "adapters": ADAPTERS, "frozen_dtype": "nf4"}),
    "LoRA, nf4, pieces": (
        "llama", {"dtype": "bf16", "adapters": ADAPTERS, "frozen_dtype": "nf4", "piece_size": "24KiB"}
    ),
    "full, pieces": ("llama", {"dtype": "bf16", "piece_size": "24KiB"}),
    "rows in chunks": ("llama", {"dtype": "bf16", "chunk": 16}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_page(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One flip in each page of a running engine, read alone; then flips in a step, and what the step after it does."""
    monkeypatch.setattr(memory_plan, "SMALLEST_CHUNK", 4096)
    monkeypatch.setattr(memory_plan, "LARGEST_CHUNK", 4096)
    family, options = CONFIGURATIONS[name]
    feed = batches(4, packed=False)
    with opened(tmp_path / "undisturbed", family, **options) as engine:
        train_and_commit(engine, feed)
        expected = digests(engine)
    engine = opened(tmp_path, family, **options)
    train_and_commit(engine, feed[:2])
    counts = flip_pages(engine)
    counts["overwritten: not read"] = flip_what_will_be_written(engine)
    train_and_commit(engine, feed[2:3])
    engine.close()
    assert not verify_run(find_runs([tmp_path / "ssd0", tmp_path / "ssd1"])[0]).damage

    resume = {**options, "resume": True}
    with opened(tmp_path, family, **resume) as engine:
        last = {page.part: page for page in pages(engine, engine._run.commits.state.slot)}
    for page in (last["parameters"], last["states"]):
        # Before the engine opens: it reads ahead of the first step
        flip(page.file, page.start)
        named = f"{page.checked.what} is damaged: .* of {re.escape(str(page.file))} .*begin again with"
        engine = opened(tmp_path, family, **resume)
        with pytest.raises(FinetuneError, match=named):
            train_and_commit(engine, feed[3:])
        assert engine.committed_step == 3
        engine.close()
        flip(page.file, page.start)
        counts["in a step: noticed"] += 1
    engine = opened(tmp_path, family, **resume)
    train_and_commit(engine, feed[3:])
    assert digests(engine) == expected
    engine.close()
    print(name, dict(counts))


@dataclass(frozen=True)
class LookingRun(RanksRun):
    """Each rank flips every page of its drives, reads it, and leaves how many were noticed."""

    def look(self, engine: fuyou.Engine, node: int) -> None:
        counts = flip_pages(engine, exports=False)
        self.root.with_name(f"noticed{node}").write_text(str(counts["trained: noticed"]))


@pytest.mark.slow
def test_every_page_of_two_ranks(tmp_path: Path) -> None:
    outcome = execute(LookingRun(tmp_path / "run", {"host_cache": 0}))
    assert outcome.status == 0, outcome.error
    counts = [int((tmp_path / f"noticed{node}").read_text()) for node in range(2)]
    print("two ranks", counts)
    assert all(count > 30 for count in counts)
