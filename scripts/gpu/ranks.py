"""FCDP with two ranks, each a node, on the one device over gloo: exactness with CUDA streams in play, a hunt for races
in which copies come late, and the time of a load from the host cache next to that of a plain pinned copy.

NCCL refuses two ranks on one GPU. With one, its section makes the calls that training makes in a group of one rank;
with two GPUs or more, it is FCDP with a rank on each of the first two.

A sum of two numbers has one order, so losses and weights must equal those of an ordinary loop to the bit.
"""

import copy
import multiprocessing
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.multiprocessing import start_processes
from transformers import LlamaConfig, LlamaForCausalLM, logging

import fcdp
from common.communication import all_gather_object
from fcdp.cache import cached_shards
from gpu.journal import Check, Skip

WORLD = 2
STEPS = 5


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Case:
    """One training run, with FCDP and with an ordinary loop."""

    dtype: torch.dtype
    micro_batches: int = 1
    threshold: float = 0.0
    late: bool = False  # Whether copies to and from the cache are delayed at random
    hidden: int = 256
    seed: int = 0

    @property
    def name(self) -> str:
        location = "shares on the host" if self.threshold == 0 else "shares on the device"
        return f"{self.micro_batches} micro-batches, {location}{f', late copies ({self.seed})' if self.late else ''}"


def cases(quick: bool) -> list[Case]:
    """What matters most first."""
    if quick:
        return [Case(torch.bfloat16, hidden=32), Case(torch.float32, 2, late=True, hidden=32)]
    plain = [Case(dtype, micro, threshold) for dtype in (torch.bfloat16, torch.float32) for micro in (1, 4)
             for threshold in (0.0, 0.9)]  # fmt: skip
    return plain + [Case(torch.bfloat16, 2, 0.9 * (seed % 2), late=True, seed=seed) for seed in range(20)]


def run(check: Check) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nccl = check.name == "nccl"
    if nccl and not check.cuda:
        raise Skip("no CUDA")
    if nccl:
        call_nccl(check, port)
    if nccl and torch.cuda.device_count() < WORLD:
        return
    rows: Any = multiprocessing.get_context("spawn").SimpleQueue()
    settings = check.settings
    words = (port, None if nccl else settings.device, settings.quick, settings.deadline, rows)
    # CUDA does not survive a fork; without it, that is seconds faster
    method = "spawn" if check.cuda else "fork"
    ranks: Any = start_processes(_rank, words, WORLD, join=False, start_method=method)
    ended = False
    while not ended:
        ended = ranks.join(timeout=0.2)  # raises what a rank has raised
        while not rows.empty():
            kind, row = rows.get()
            if kind == "case":
                check.add("cases", **row)
            else:
                check.note(load=row)


def call_nccl(check: Check, port: int) -> None:
    """Make the calls of training with NCCL in a group of one rank; each is kept when it has ended."""
    device = torch.device(check.settings.device)
    torch.cuda.set_device(device)
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("cuda:nccl,cpu:gloo", init_method=where, rank=0, world_size=1)
    group = dist.new_group([0], timeout=timedelta(seconds=20))
    sent, received = (torch.full((1 << 20,), value, device=device) for value in (1.0, 0.0))
    calls: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: dist.all_gather_into_tensor(received, sent, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(received, sent, group=group),
        "all_reduce": lambda: dist.all_reduce(received, group=group),
        "broadcast": lambda: dist.broadcast(received, 0, group=group),
        "barrier": dist.barrier,
    }
    for name, call in calls.items():
        received.zero_()

        def checked(
            call: Callable[[], Any] = call, nothing: bool = name in ("all_reduce", "broadcast", "barrier")
        ) -> str:
            call()
            torch.cuda.synchronize(device)
            return "right" if torch.equal(received, torch.zeros_like(sent) if nothing else sent) else "wrong"

        check.attempt(name, checked)
    dist.destroy_process_group()


def _rank(rank: int, port: int, device_name: str | None, quick: bool, deadline: float, rows: Any) -> None:
    """Be one of two ranks, on the device, or on a GPU for each over NCCL."""
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    device = torch.device(device_name or f"cuda:{rank}")
    backend = "gloo" if device_name else "cuda:nccl,cpu:gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    topology = fcdp.Topology(WORLD, 1, device=device)
    for case in cases(quick):
        in_time = all(all_gather_object(time.time() < deadline - 15))
        row = (
            compare(case, topology)
            if in_time
            else {**_named(case), "verdict": "not run", "why": "out of time"}
        )
        if rank == 0:
            rows.put(("case", row))
    load = measure_load(topology, 64 if quick else 4096)
    if rank == 0:
        rows.put(("load", load))
    topology.close()
    dist.destroy_process_group()


def compare(case: Case, topology: fcdp.Topology) -> dict[str, Any]:
    """Train both ways; a row of the table, the same on both ranks."""
    batches = _batches(case)
    expected, weights = _plain(case, topology.device, batches)
    with _late_copies(case, topology.device):
        got, trained, hits = _sharded(case, topology, batches[topology.rank])
    wrong = sum(a != b for a, b in zip(got, expected[topology.rank], strict=True))
    differing = sum(not torch.equal(a, b) for a, b in zip(trained, weights, strict=True))
    told = torch.tensor([wrong, differing])
    dist.all_reduce(told)
    equal = not told.any()
    return {
        **_named(case), "verdict": "equal" if equal else "wrong", "losses": len(got), "losses_differing": int(told[0]),
        "tensors_differing": int(told[1]), "hits": hits,
    }  # fmt: skip


def _named(case: Case) -> dict[str, Any]:
    return {"name": case.name, "dtype": str(case.dtype).removeprefix("torch.")}


def _model(case: Case, device: torch.device) -> nn.Module:
    torch.manual_seed(case.seed)
    config = LlamaConfig(
        vocab_size=512, hidden_size=case.hidden, intermediate_size=3 * case.hidden, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config)
    return model.to(device).train()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    # The fused kernel treats the ends of a tensor differently from its middle, and shards have other ends.
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)


def _batches(case: Case) -> torch.Tensor:
    generator = torch.Generator().manual_seed(case.seed)
    return torch.randint(0, 512, (WORLD, STEPS, case.micro_batches, 2, 32), generator=generator)


def _plain(
    case: Case, device: torch.device, batches: torch.Tensor
) -> tuple[list[list[float]], list[torch.Tensor]]:
    """Losses by rank, and the weights at the end, of one process that does the work of all ranks in turn."""
    masters = _model(case, device)
    optimizer = _optimizer(masters)
    computing = copy.deepcopy(masters)
    for parameter in computing.parameters():
        parameter.data = parameter.data.to(case.dtype)
    pairs = list(zip(masters.parameters(), computing.parameters(), strict=True))
    losses: list[list[float]] = [[] for _ in range(WORLD)]
    for step in range(STEPS):
        for index in range(case.micro_batches):  # each is reduced over all ranks, as in the paper
            total: list[torch.Tensor] = []
            for rank in range(WORLD):
                ids = batches[rank, step, index].to(device)
                loss = computing(input_ids=ids, labels=ids).loss / case.micro_batches
                loss.backward()
                losses[rank].append(loss.item())
                gradients = [parameter.grad for _, parameter in pairs if parameter.grad is not None]
                total = [a + b for a, b in zip(total, gradients, strict=True)] if total else gradients
                computing.zero_grad()
            for (master, _), gradient in zip(pairs, total, strict=True):
                mean = (gradient / WORLD).to(master.dtype)
                master.grad = mean if master.grad is None else master.grad + mean
        optimizer.step()
        optimizer.zero_grad()
        for master, parameter in pairs:
            parameter.data.copy_(master.data)
    return losses, [master.detach() for master, _ in pairs]


def _sharded(
    case: Case, topology: fcdp.Topology, batches: torch.Tensor
) -> tuple[list[float], list[torch.Tensor], int]:
    model: Any = _model(case, topology.device)
    policy = MixedPrecisionPolicy(case.dtype, case.dtype)
    fcdp.fully_shard(model, topology, mp_policy=policy, device_cache_threshold=case.threshold)
    sharding = fcdp.sharding(model)
    optimizer = _optimizer(model)
    losses = []
    for step in batches:
        for index, ids in enumerate(step.to(topology.device)):
            sharding.set_is_last_micro_batch(index == case.micro_batches - 1)
            loss = model(input_ids=ids, labels=ids).loss / case.micro_batches
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    hits = sharding.traffic.hits
    weights = [_whole(parameter.detach().to_local(), parameter.shape) for parameter in model.parameters()]
    sharding.close()
    return losses, weights, hits


def _whole(shard: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """All ranks' rows, by way of the host: gloo has not every collective for CUDA tensors."""
    local = shard.cpu()
    everyone = [torch.empty_like(local) for _ in range(WORLD)]
    dist.all_gather(everyone, local)
    return torch.cat(everyone).view(shape).to(shard.device)


@contextmanager
def _late_copies(case: Case, device: torch.device) -> Iterator[None]:
    """Have every copy to and from the cache wait at random on its stream: what does not wait for it reads rubbish."""
    original: Callable[..., torch.Tensor] = cached_shards._copy_cells
    choose = random.Random(case.seed)

    def late(*arguments: Any, **keywords: Any) -> torch.Tensor:
        if choose.random() < 0.5:
            if device.type == "cuda":
                torch.cuda._sleep(choose.randrange(20_000_000))  # cycles: up to some 10 ms
            else:
                time.sleep(choose.random() * 1e-3)
        return original(*arguments, **keywords)

    if case.late:
        cached_shards._copy_cells = late
    try:
        yield
    finally:
        cached_shards._copy_cells = original


def measure_load(topology: fcdp.Topology, width: int) -> dict[str, float]:
    """Bytes per second into an output from the host cache, and of a plain copy of as many bytes; both ranks at once."""
    model: Any = nn.Sequential(nn.Linear(width, 4 * width, bias=False, device=topology.device))
    fcdp.fully_shard(model, topology, blocks=[model[0]], device_cache_threshold=0.0)
    sharding = fcdp.sharding(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, foreach=True)
    model(torch.ones(1, width, device=topology.device)).sum().backward()  # fills the cache
    optimizer.zero_grad()
    share = next(gather.cached for gather in sharding._gathers if gather.cached is not None)
    column = torch.empty(WORLD, share.nbytes // 4 // WORLD, device=topology.device)
    nbytes = column[0].numel() * 4
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=topology.device.type == "cuda")
    target = torch.empty_like(pinned, device=topology.device)

    def rate(work: Callable[[], Any]) -> float:
        work()
        synchronize(topology.device)
        dist.barrier()
        began = time.perf_counter()
        for _ in range(10):
            work()
        synchronize(topology.device)
        return 10 * nbytes / (time.perf_counter() - began)

    result = {
        "bytes": float(nbytes), "load": rate(lambda: share.load(column, topology.node, None)),
        "pinned_copy": rate(lambda: target.copy_(pinned, non_blocking=True)),
    }  # fmt: skip
    sharding.close()
    return result
