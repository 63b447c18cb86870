"""Errors are reported on every rank, before harm is done, and at the end of the process, too."""

import itertools
import os
import subprocess
import sys
import textwrap
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fcdp
from common.communication import run_on_all_ranks, timeout_of
from common.errors import FinetuneError, UserError
from tests.helpers.fcdp.cases import VOCABULARY, Case, make_model, make_optimizer
from tests.helpers.fcdp.pool import Pool


def _sharded(topology: fcdp.Topology, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = fcdp.fully_shard(make_model(Case(lora=True)), topology, **options)
    return model, make_optimizer(model, "fused")


def _step(model: Any, *, last: bool = True) -> None:
    ids = torch.arange(12).view(1, 12) % VOCABULARY
    fcdp.sharding(model).set_is_last_micro_batch(last)
    model(input_ids=ids, labels=ids).loss.backward()


def _overwrite_in_place(topology: fcdp.Topology) -> tuple[str, bool]:
    """As an in-place checkpoint load does: local tensors are written, no hook fires."""
    model, _ = _sharded(topology)
    _step(model)
    state = model.state_dict()
    with torch.no_grad():
        for value in state.values():
            value.to_local().mul_(1.5)
    message = ""
    try:
        model(input_ids=torch.arange(8).view(1, 8))
    except fcdp.StaleCacheError as error:
        message = str(error)
    dist.barrier()
    return message, True


def test_a_stale_cache_is_found_on_every_rank(pool: Pool) -> None:
    for message, _ in pool.run((2, 2), _overwrite_in_place):
        assert "have changed since they were cached" in message
        assert "invalidate()" in message


def _no_memory_on_rank_1(topology: fcdp.Topology) -> str:
    def allocate() -> None:
        if topology.rank == 1:
            raise OSError(12, "Cannot allocate memory")

    with pytest.raises(FinetuneError) as caught:
        run_on_all_ranks(allocate)
    return str(caught.value)


def test_an_unexpected_error_of_one_rank_ends_all_of_them(pool: Pool) -> None:
    assert pool.run((2, 1), _no_memory_on_rank_1) == ["OSError: [Errno 12] Cannot allocate memory"] * 2


def _timeouts(topology: fcdp.Topology) -> list[timedelta | None]:
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=77), topology.mesh.get_group())
    mesh = fcdp.Topology(2, 2).shard_mesh(2)
    return [timeout_of(group, topology.device) for group in (topology.mesh.get_group(), mesh.get_group())]


def test_groups_of_meshes_have_the_timeout_of_all_ranks(pool: Pool) -> None:
    assert pool.run((2, 2), _timeouts) == [[timedelta(seconds=77)] * 2] * 4


def _step_half_way(topology: fcdp.Topology) -> str:
    model, optimizer = _sharded(topology, strategy="fcdp-iig")
    _step(model, last=False)
    try:
        optimizer.step()
    except FinetuneError as error:
        message = str(error)
    fcdp.sharding(model).discard_gradients()
    optimizer.zero_grad()
    _step(model)
    optimizer.step()
    return message


def test_an_optimizer_step_before_the_last_micro_batch_is_rejected(pool: Pool) -> None:
    assert all("set_is_last_micro_batch(True)" in message for message in pool.run((2, 2), _step_half_way))


def _bad_numbers(topology: fcdp.Topology) -> list[str]:
    messages = []
    for local_world, call in [
        ("2" if topology.rank < 2 else "1", fcdp.Topology.from_environment),
        ("", fcdp.Topology.from_environment),
        ("", lambda: fcdp.Topology(2, 2)),
        ("", lambda: fcdp.fully_shard(make_model(Case()), topology, "fdcp")),  # type: ignore[arg-type]
        ("", lambda: fcdp.fully_shard(make_model(Case()), topology, device_cache_threshold=90)),
        ("", lambda: fcdp.sharding(make_model(Case()))),
    ]:
        os.environ.pop("LOCAL_WORLD_SIZE", None)
        if local_world:
            os.environ["LOCAL_WORLD_SIZE"] = local_world
        try:
            call()
            messages.append("nothing was raised")
        except UserError as error:
            messages.append(str(error))
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    return messages


def test_what_cannot_be_is_rejected_on_every_rank(pool: Pool) -> None:
    words = [
        "same number of ranks",
        "LOCAL_WORLD_SIZE is not set",
        "runs 3",
        "'fcdp'",
        "0 to 1, not 90",
        "not sharded",
    ]
    for messages in pool.run((3, 1), _bad_numbers):
        for message, part in zip(messages, words, strict=True):
            assert part in message


STRATEGIES = ("fcdp", "zero1", "zero2", "zero3", "hybrid", "ddp")


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


def _freeze_none(model: _Layers, step: int) -> None:
    pass


def _freeze_later(model: _Layers, step: int) -> None:
    if step in (2, 4):
        model.layers[1:3].requires_grad_(step == 4)


def _unfreeze_later(model: _Layers, step: int) -> None:
    if step in (0, 3):
        model.layers[:2].requires_grad_(step == 3)


def _freeze_parts(model: _Layers, step: int) -> None:
    if step in (0, 2, 4):
        model.layers[1].weight.requires_grad_(step == 2)
        model.head.bias.requires_grad_(step != 2)


def _between_freeze(model: _Layers, step: int) -> None:
    if step in (1, 3):
        model.layers[1:3].requires_grad_(step == 3)


def _between_unfreeze(model: _Layers, step: int) -> None:
    """Before the first step it freezes, as all of these are called once before the model is sharded."""
    if step in (0, 2):
        model.layers[:2].requires_grad_(step == 2)


def _between_parts(model: _Layers, step: int) -> None:
    if step in (1, 3):
        model.layers[1].weight.requires_grad_(step == 3)
        model.head.bias.requires_grad_(step == 3)


def _between_all_but_one(model: _Layers, step: int) -> None:
    if step in (1, 2, 4):
        model.requires_grad_(step == 4)
        model.head.weight.requires_grad_(True)


# Forward and backward pass
BETWEEN = (_between_freeze, _between_unfreeze, _between_parts, _between_all_but_one)
FREEZING = (_freeze_none, _freeze_later, _unfreeze_later, _freeze_parts)


def _people_s_loop(
    model: _Layers, freeze: Any, rank: int, ranks: int, evaluates: bool, optimizers: int
) -> dict[str, torch.Tensor]:
    """Train six steps on this rank's part of each batch; return all parameters."""
    own = torch.randn(7, 8, 6, generator=torch.Generator().manual_seed(1))[:, rank::ranks]
    if evaluates:
        with torch.no_grad():
            model(own[6])
    parameters = list(model.parameters())
    made = [torch.optim.AdamW(parameters[index::optimizers], lr=1e-2) for index in range(optimizers)]
    for step in range(6):
        if freeze not in BETWEEN:
            freeze(model, step)
        loss = (model(own[step]) ** 2).mean()
        if freeze in BETWEEN:
            freeze(model, step)
        loss.backward()
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad()
        if evaluates:
            with torch.no_grad():
                model(own[6])
    state = model.state_dict()
    return {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in state.items()}


def _loops_that_differ(
    topology: fcdp.Topology, freezing: tuple[Any, ...], counts: tuple[int, ...]
) -> list[str]:
    wrong = []
    for freeze, evaluates, optimizers in itertools.product(freezing, (False, True), counts):
        model = _Layers()
        freeze(model, 0)
        expected = _people_s_loop(model, freeze, 0, 1, evaluates, optimizers)
        for strategy in STRATEGIES:
            model = _Layers()
            freeze(model, 0)
            sharded = fcdp.fully_shard(model, topology, strategy)
            ranks = topology.world_size
            state = _people_s_loop(sharded, freeze, topology.rank, ranks, evaluates, optimizers)
            apart = max(float((state[name] - value).abs().max()) for name, value in expected.items())
            if apart > 1e-5:
                wrong.append(f"{strategy}, {freeze.__name__}, {evaluates=}, {optimizers=}: {apart:.1e}")
            fcdp.sharding(sharded).close()
    return wrong


@pytest.mark.slow
def test_what_loops_freeze_and_evaluate_is_as_in_a_plain_loop(pool: Pool) -> None:
    assert pool.run((2, 1), _loops_that_differ, FREEZING, (1, 2)) == [[], []]


@pytest.mark.slow
def test_what_loops_freeze_between_the_passes_is_as_in_a_plain_loop(pool: Pool) -> None:
    assert pool.run((2, 1), _loops_that_differ, BETWEEN, (1,)) == [[], []]


def _optimizer_of_gathered(topology: fcdp.Topology) -> str:
    model = fcdp.fully_shard(_Layers(), topology, "zero2")
    model(torch.ones(2, 6))  # with gradients, so that parameters stay gathered for a backward pass
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    with pytest.raises(UserError) as caught:
        optimizer.step()
    return str(caught.value)


def test_an_optimizer_of_gathered_parameters_is_rejected(pool: Pool) -> None:
    for message in pool.run((2, 1), _optimizer_of_gathered):
        assert "10 of the 10 parameters" in message and "fcdp.sharding(model).reshard()" in message


@pytest.mark.parametrize("tidy", [True, False])
@pytest.mark.slow
def test_processes_end_cleanly(tidy: bool, tmp_path: Path) -> None:
    """A process group that outlives destroy_process_group can abort the interpreter at exit."""
    program = textwrap.dedent(f"""
        import os, sys, torch, torch.distributed as dist, fcdp
        from torch import nn
        rank = int(sys.argv[1])
        dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
        topology = fcdp.Topology(2, 1, device="cpu")
        model = fcdp.fully_shard(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3)), topology)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(2):
            model(torch.ones(2, 5)).sum().backward()
            optimizer.step()
        if {tidy}:
            fcdp.sharding(model).close()
            topology.close()
        dist.destroy_process_group()
    """)
    store = str(tmp_path / "store")
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", program, str(rank), store],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        _, said = process.communicate(timeout=240)
        assert process.returncode == 0, said
        assert "terminate" not in said
