"""What AdamW skips where ``grad is None``, the engine skips, to the bit, in every use of the gradient."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fuyou.layout.record import Kind, Precision, Record
from fuyou.layout.share import Share
from fuyou.optimizer import chunk_update
from fuyou.optimizer.absent_gradients import AbsenceMarks, OwnedParameters
from fuyou.optimizer.adam import AdamConfig, Update, UpdateRange
from fuyou.optimizer.chunk_update import ChunkOptimizer
from fuyou.optimizer.moments import OptimizerStates
from tests.helpers.engines import OPTIONS, compare, directories, engine
from tests.helpers.models.routed import RoutedConfig
from tests.helpers.twin import Twin

ROWS, TOKENS, STEPS = 2, 3, 6
SHAPES = {"up": (70, 50), "norm": (50,), "down": (50, 70), "scale": (1,)}


def record(dtype: torch.dtype = torch.bfloat16, share: Share | None = None) -> Record:
    parameters = [((name,), shape, len(shape) > 1) for name, shape in SHAPES.items()]
    made = Record.build(0, "block 0", Kind.BLOCK, Precision(dtype), parameters)
    return made if share is None else made.shared(share)


def names(layout: Record, indices: tuple[int, ...]) -> set[str]:
    return {layout.parameters[index].name for index in indices}


@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_sum_over_ranks_has_none_only_where_no_rank_has_one(
    ranks: tuple[int, int], dtype: torch.dtype
) -> None:
    shares = Share(*ranks).everyone()
    total, world = None, len(shares)
    for rank in range(world):
        layout = record(dtype, shares[rank])
        gradient = torch.zeros(layout.numel, dtype=dtype)
        present = {"up"} if rank == 0 else {"norm"} if rank == world - 1 else set()
        for name, view in layout.views(gradient).items():
            if name in present:
                view.fill_(-0.0)  # the worst that a gradient can be: nothing but this
        AbsenceMarks(layout, gradient.device).mark(gradient, present)
        assert not gradient.any()
        total = gradient if total is None else (total.float() + gradient.float()).to(dtype)
    assert total is not None
    seen: set[str] = set()
    for share in shares:
        layout = record(dtype, share)
        start = share.owned_start(layout.numel)
        absent = names(layout, OwnedParameters(layout).absent(total[start : start + layout.owned]))
        assert not absent & {"up", "norm" if world > 1 else "up"}
        seen |= absent
    assert seen == set(SHAPES) - {"up", "norm"} if world > 1 else set(SHAPES) - {"up"}


@pytest.mark.parametrize("count", [128, 1152, 5248])
def test_equals_torch_adamw_where_some_gradients_are_none(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three parameters, of which the second has a gradient, then none, then one again, and the third never has one."""
    monkeypatch.setattr(chunk_update, "PASS_ELEMENTS", 1024)
    config = AdamConfig(lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    parameters = [torch.nn.Parameter(torch.randn(count)) for _ in range(3)]
    master = torch.cat([parameter.detach() for parameter in parameters])
    mean, variance = torch.zeros_like(master), torch.zeros_like(master)
    torch_adam = torch.optim.AdamW(
        parameters, config.lr, config.betas, config.eps, config.weight_decay, fused=True
    )
    missed = [0, 0, 0]
    for step, there in enumerate([(0, 1), (0,), (0,), (0, 1), (1,), ()], start=1):
        gradient = torch.randn(3 * count)
        for index, parameter in enumerate(parameters):
            parameter.grad = gradient[index * count :][:count].clone() if index in there else None
        torch_adam.step()
        runs = [UpdateRange(index * count, (index + 1) * count, missed[index]) for index in there]
        states = OptimizerStates(master, None, (mean, variance))
        ChunkOptimizer().update(states, gradient, Update(step, config), decay=True, runs=runs)
        missed = [known + (index not in there) for index, known in enumerate(missed)]
        assert torch.equal(master, torch.cat([parameter.detach() for parameter in parameters])), step


# -- the engine ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("routed")
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(RoutedConfig()).save_pretrained(path)
    return path


def feed(steps: int = STEPS) -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        tokens = torch.randint(0, 67, (ROWS, TOKENS), generator=generator)
        yield {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize(("dtype", "options"), [
    ("fp32", {"micro_batch": 2}),
    ("bf16", {"micro_batch": 1, "max_grad_norm": 0.1}),
    ("bf16", {"micro_batch": 1, "max_grad_norm": 0.165, "clip_by": "speculation"}),
    pytest.param(
        "bf16", {"micro_batch": 1, "max_grad_norm": 0.165, "clip_by": "speculation", "host_cache": None},
        marks=pytest.mark.slow,
    ),
    ("fp32", {"micro_batch": 1, "commit_every": 2, "host_cache": None, "deferred_fraction": 0.5}),
    ("bf16", {"micro_batch": 2}),
], ids=lambda value: ", ".join(map(str, value.values())) if isinstance(value, dict) else value)  # fmt: skip
def test_experts_without_tokens(dtype: str, options: dict[str, Any], routed: Path, tmp_path: Path) -> None:
    """With a break in which the run is closed and continued: counts of updates must survive it."""
    twin = Twin(str(routed), bf16=dtype == "bf16", max_grad_norm=options.get("max_grad_norm"), **OPTIONS)
    drives, batches = directories(tmp_path, 2), list(feed())
    had: dict[str, list[bool]] = {name: [] for name in twin.masters}
    clipped = []
    for first, last in pairwise((0, 3, STEPS)):
        shape: dict[str, Any] = {"batch_shape": (ROWS, TOKENS), "resume": first > 0}
        with engine(routed, drives, dtype, **shape, **options) as trained:
            for batch in batches[first:last]:
                out = trained(**batch)
                out.loss.backward()
                clipped.append(trained.step().clipped)
                before = dict(twin.steps)
                assert out.loss.item() == twin.step(batch, options["micro_batch"])
                for name, count in twin.steps.items():
                    had[name].append(count > before[name])
            compare(trained, twin)
    histories = {"".join("01"[there] for there in history).lstrip("0") for history in had.values()}
    assert any("1" in history.partition("0")[2] for history in histories), (
        "one had some, none, and some again"
    )
    assert not any(had["blocks.0.experts.7.weight"]), "one never had any"
    if "clip_by" in options:
        assert len(set(clipped)) == 2
