"""What ranks do in the tests: train small models and tell what came out."""

import hashlib
import shutil
import tempfile
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import peft
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import fcdp
from common.communication import broadcast_from_rank0
from fcdp.cache.cached_shards import DeviceMemory
from tests.helpers.fcdp.twin import InOrder, Plain, Ring

warnings.filterwarnings("ignore")

VOCABULARY = 67


@dataclass(frozen=True)
class Case:
    """One training run, to be done with one strategy or another."""

    bf16: bool = False
    lora: bool = False
    targets: tuple[str, ...] = ("q_proj", "v_proj", "down_proj")
    """Of LoRA."""
    tied: bool = False
    micro_batches: int = 1
    checkpointing: bool = False
    steps: int = 5
    optimizer: str = "fused"
    event: str = ""
    """What happens in the middle: see :func:`_happen`."""


@dataclass(frozen=True)
class Outcome:
    """Compared between strategies: equal means equal bit for bit."""

    losses: tuple[float, ...]
    weights: str
    """Digest of all parameters."""


def make_model(case: Case) -> nn.Module:
    """A Llama of two blocks whose sizes are multiples of nothing, the same on every rank."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=36, intermediate_size=50, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, tie_word_embeddings=case.tied, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    model: Any = transformers.LlamaForCausalLM(config)
    if case.lora:
        lora = peft.LoraConfig(r=3, target_modules=list(case.targets), init_lora_weights=False)
        model = peft.get_peft_model(model, lora)
    if case.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def policy(case: Case) -> MixedPrecisionPolicy:
    """fp32 throughout; or computing and reducing in bf16."""
    return MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16) if case.bf16 else MixedPrecisionPolicy()


def train(
    topology: fcdp.Topology, case: Case, strategy: str, *, in_order: str = "", reduction: str = "",
    inspect: Callable[[Any], Any] | None = None, memory: str = "", **options: Any,
) -> tuple[Outcome, Any]:  # fmt: skip
    """Train; what came out, and what ``inspect`` returned at the end.

    Args:
        strategy: one of ours, or one of :class:`Plain`'s.
        in_order: replace FSDP2's reduce-scatter by the twin's, which adds over nodes ``each`` micro-batch, or ``once``.
        reduction: ``fsdp2``: replace ours by FSDP2's.
        memory: stands for a device's memory: see :func:`_memory`.
    """
    model: Any = make_model(case)
    sharding: Any
    if strategy.startswith("fsdp2"):
        sharding = Plain(model, topology, strategy, policy(case))
    else:
        room = (
            mock.patch.object(DeviceMemory, "of", return_value=_memory(memory)) if memory else nullcontext()
        )
        with room:
            model = fcdp.fully_shard(model, topology, strategy, mp_policy=policy(case), **options)
        sharding = fcdp.sharding(model)
    if case.event == "compile":
        torch.compiler.reset()  # what is compiled depends on what was before
        for block in sharding.groups:
            if block.name.split(".")[-1].isdigit():
                block.modules[0].compile(backend="aot_eager")
    twins = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            if reduction == "fsdp2":
                module.set_custom_reduce_scatter(Ring())
            if in_order:
                twins.append(InOrder(topology.nodes, topology.ranks_per_node))
                module.set_custom_reduce_scatter(twins[-1])
    optimizer = make_optimizer(model, case.optimizer)
    generator = torch.Generator().manual_seed(100 + topology.rank)
    losses = []
    saved: dict[str, Any] = {}
    for step in range(case.steps):
        _happen(case.event, step, model, sharding, saved)
        for index in range(case.micro_batches):
            is_last = index == case.micro_batches - 1
            sharding.set_is_last_micro_batch(is_last)
            for twin in twins:
                twin.is_last = is_last or in_order == "each"
            ids = torch.randint(0, VOCABULARY, (2, 9), generator=generator)
            loss = model(input_ids=ids, labels=ids).loss / case.micro_batches
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    seen = inspect(sharding) if inspect else None
    outcome = Outcome(tuple(losses), digest(model))
    sharding.close()
    dist.barrier()
    if "path" in saved and topology.rank == 0:
        shutil.rmtree(saved["path"])
    return outcome, seen


def make_optimizer(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    """Over all parameters, frozen ones too, as careless code does."""
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=kind == "fused", foreach=kind == "foreach")


def digest(model: nn.Module) -> str:
    """Of every bit of every parameter. Collective."""
    state = hashlib.sha256()
    for name, parameter in model.named_parameters():
        value: Any = parameter.detach()
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        state.update(name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def _memory(kind: str) -> DeviceMemory:
    """``some``: room for part of the shares. ``all``: for all. ``waves``: for all, but pressure comes and goes."""
    if kind == "some":
        return DeviceMemory(40_000, lambda: 8_000)
    if kind == "all":
        return DeviceMemory(10**9, lambda: 0)
    looks = iter(range(10**9))
    return DeviceMemory(10**9, lambda: 10**10 if next(looks) % 11 == 10 else 0)


def _happen(event: str, step: int, model: Any, sharding: Any, saved: dict[str, Any]) -> None:
    """Things that users do between steps."""
    if event == "load_in_place":
        if step == 1:
            saved["path"] = _shared_directory()
            dcp.save(_other(model), checkpoint_id=saved["path"])
        if step == 3:
            dcp.load(model.state_dict(), checkpoint_id=saved["path"])
            sharding.invalidate()
    if event == "load_state_dict":
        if step == 1:
            saved["state"] = _other(model)
        if step == 3:
            model.load_state_dict(saved["state"])
    if event == "load_part":
        part = next(module for name, module in model.named_modules() if name.endswith("layers.1.mlp"))
        if step == 1:
            saved["state"] = _other(part)
        if step == 3:
            part.load_state_dict(saved["state"])
    if event == "freeze_and_thaw":
        for name, parameter in model.named_parameters():
            if "layers.1." in name and step in (2, 4):
                parameter.requires_grad_(step == 4)
    if event == "thaw":
        for name, parameter in model.named_parameters():
            if step == 2 and ("layers.1.input_layernorm" in name or "layers.0." in name):
                parameter.requires_grad_(True)
    if event == "evaluate" and step in (1, 3):
        model.eval()
        with torch.no_grad():
            ids = torch.arange(8).view(1, 8)
            model(input_ids=ids)
        model.train()


def _other(module: nn.Module) -> dict[str, Any]:
    """A state that differs from the present one in every parameter, frozen ones too."""
    return {name: value.detach() * 1.0625 for name, value in module.state_dict().items()}


def _shared_directory() -> str:
    """A new directory that all ranks know."""
    directory: str = broadcast_from_rank0(lambda: tempfile.mkdtemp(prefix="fcdp-"))
    return directory
