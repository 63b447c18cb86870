"""A causal language model that the ranks of a cluster train together: what :class:`fuyou.Engine` is on one machine.

Every rank makes the same calls with the whole batch, of which it takes its rows. Losses and gradients are means over
all labels of the batch, so they do not depend on the number of ranks, except for rounding."""

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from peft import PeftConfig
from torch.distributed.tensor import DTensor

from common.communication import all_gather_object, broadcast_from_rank0, run_on_all_ranks
from common.errors import UserError
from common.memory import numa
from common.memory.meter import PeakMeter
from common.models.adapters.adapters import MERGED
from common.models.adapters.options import SavedAdapter
from common.models.checkpoint.identity import weights_identity
from common.models.checkpoint.sources import CheckpointSource
from common.models.checkpoint.watched import WatchedFiles
from common.models.checkpoint.writer import CheckpointWriter
from common.models.flops import active_parameters, model_flops_per_token
from common.models.structure import decayed_parameters
from common.randomness import seed_run
from fcdp.checkpoint import ShardedCheckpoints
from fcdp.model import ClusterModel, Forward, TrainerConfig, gather_blocks, load, whole
from fcdp.shard import sharding
from fcdp.strategy.topology import Topology
from fuyou.model.loss.cross_entropy import cross_entropy
from fuyou.model.loss.router_loss import RouterPass
from fuyou.optimizer.adam import check_learning_rate
from fuyou.optimizer.clipping import clip_coefficient
from fuyou.optimizer.gradient_sum import sum_of_squares
from fuyou.optimizer.nonfinite import check_finite
from fuyou.pieces.run import random_states, set_random_states

# Key of the identity of the checkpoint's weights in what a commit says of the run
_BASE = "weights to begin with"
_SHARD_BYTES = 1_000_000_000  # largest shard of an exported checkpoint. Rank 0 holds two.


@dataclass(frozen=True)
class ClusterStep:
    """One finished step, the same on every rank but for ``seconds``."""

    step: int
    loss: float
    grad_norm: float  # norm of the whole gradient before clipping
    stop: bool  # whether any rank requested to stop after this step
    seconds: float
    sent_bytes: int  # bytes that a node sent to others, on average over nodes
    # The router loss, not multiplied by its coefficient, where it is a part of the loss
    aux_loss: float | None = None


class Trainer:
    """Trains ``model`` on all ranks of ``topology``. Making one is collective, and so is every method that computes.

    Blocks are recomputed in the backward pass where the family supports it. Errors in files are raised on every rank.

    Args:
        model: checkpoint directory, which every node must be able to read, or a preset's name.
        commits: folder for commits, on a file system that all nodes share. No other run can use it until :meth:`close`.
        adapters: what to train instead of the weights: a configuration of ``peft``, or a directory of saved adapters.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        topology: Topology,
        config: TrainerConfig,
        commits: Path,
        adapters: PeftConfig | str | os.PathLike[str] | None = None,
    ):
        self._topology = topology
        self._options = config
        self._device = topology.device
        self.cores = _pin_threads(topology)  # processors that this process was pinned to; None: it was not
        pids = [pid for node, pid in all_gather_object((topology.node, os.getpid())) if node == topology.node]
        # Memory that this node's ranks hold together, for the first of them
        self.meter = PeakMeter(lambda: pids)
        if topology.local_rank == 0:
            self.meter.start()
        directory = adapters if isinstance(adapters, str | os.PathLike) else None
        self._watched = WatchedFiles(model, directory)
        saved = SavedAdapter(adapters) if isinstance(adapters, str | os.PathLike) else None
        peft_config = adapters if isinstance(adapters, PeftConfig) else saved.config() if saved else None
        self._model = ClusterModel.open(model, topology, config, peft_config, saved)
        self.sharding = sharding(self._model.module)
        self._forward = Forward(self._model, topology, config.micro_batch)
        self._optimizer = _make_optimizer(self._model, config)
        self.sharding.has_optimizer = True
        self.checkpoints = ShardedCheckpoints(commits)
        broadcast_from_rank0(self.checkpoints.lock)
        adapters_described = None if self._model.adapters is None else self._model.adapters.described
        self._identity = {  # what must be equal in a run and in the one that resumes it, by name in messages
            "model type": self._model.config.model_type,
            "parameters": sum(parameter.numel() for parameter in self._model.meta.parameters()),
            "--dtype": config.dtype,
            "adapters": adapters_described,
            "parameters with weight decay": len(decayed_parameters(self._model.module)),
        }
        base, *others = run_on_all_ranks(lambda: weights_identity(self._model.checkpoint))
        if any(other != base for other in others):
            raise UserError(
                f"{self._model.checkpoint} does not hold the same model for all ranks: copy one to all nodes, or start "
                "again once nothing writes there."
            )
        if base:
            self._identity[_BASE] = base
        if self._model.adapters is not None:
            self._model.adapters.base = base
        self.parameters = sum(parameter.numel() for parameter in self._model.module.parameters())
        self.trainable_parameters = sum(parameter.numel() for _, parameter in self._model.trained())
        self.step_count = 0
        self.committed_step = 0
        self._is_committed = False
        self.user_state: dict[str, Any] = {}  # JSON that is committed with every step

    def begin(self) -> None:
        """Load the weights that training starts from. Commits of an earlier run are removed."""
        broadcast_from_rank0(self.checkpoints.begin)
        load(self._model.module, self._model.source, self._model.adapters)
        run_on_all_ranks(self._watched.check)
        self.sharding.invalidate()

    def resume(self) -> None:
        """Continue from the newest commit of this model and dtype, made by any number of ranks."""
        commit = self.checkpoints.read_newest()
        if commit is None:
            raise UserError(f"Nothing to resume: there is no commit in {self.checkpoints.directory}.")
        saved = commit.description
        base = self._identity.get(_BASE)
        if base and saved.get(_BASE, base) != base:
            raise UserError(
                "The weights or the configuration of --model are not those that the run in "
                f"{self.checkpoints.directory} began with: they have changed, or are another version of them. Give "
                "--model as it was then, or begin a new run in another --output."
            )
        for name, now in self._identity.items():
            if saved.get(name, now) != now:
                raise UserError(
                    f"The run in {self.checkpoints.directory} has {name} {saved.get(name)}, and this one {now}. Give "
                    "what it began with, or begin a new run in another directory."
                )
        if saved.get("skipped"):  # by an earlier version
            raise UserError(
                f"The run in {self.checkpoints.directory} skipped steps that were not finite, which this version does "
                "not do. Finish it with the version that began it."
            )
        if self._model.adapters is not None:  # frozen weights are no part of a commit
            load(self._model.module, self._model.source, self._model.adapters)
        if _BASE in saved:
            self._identity[_BASE] = saved[_BASE]
        if self._model.adapters is not None:
            self._model.adapters.base = saved.get(_BASE, "")
        self.checkpoints.load(commit, self.state())
        for name, value in self._model.source.read_buffers():
            self._model.module.get_buffer(name).copy_(value)
        run_on_all_ranks(self._watched.check)
        for _, parameter in self._model.trained():
            self._optimizer.state[parameter]["step"].fill_(commit.step)
        self.sharding.invalidate()
        self.step_count = self.committed_step = commit.step
        self._is_committed = True
        self.user_state = saved["user"]

    def commit(self) -> None:
        """Put the state after the last step on the drives, unless it is there."""
        if self.step_count != self.committed_step or not self._is_committed:
            self.checkpoints.save(self.step_count, self.state(), {**self._identity, "user": self.user_state})
            self.committed_step = self.step_count
            self._is_committed = True

    def state(self) -> dict[str, torch.Tensor]:
        """Return all that changes: trained parameters and moments. Data and dropout follow from the step's number."""
        state = {}
        for name, parameter in self._model.trained():
            moments = self._optimizer.state[parameter]
            state[f"master.{name}"] = parameter.detach()
            state[f"mean.{name}"] = moments["exp_avg"]
            state[f"variance.{name}"] = moments["exp_avg_sq"]
        return state

    def train_step(self, batch: Mapping[str, torch.Tensor], lr: float, stop: bool = False) -> ClusterStep:
        """Run forward, backward and update.

        Args:
            batch: of all ranks, the same on each: ``input_ids``, ``labels``, and ``position_ids`` int64 ``[B, S]``.
            lr: the learning rate of this step.
            stop: this rank wishes to stop after this step: all ranks will know.

        Raises:
            NonFiniteLoss: loss or gradient is not finite; nothing was updated.
        """
        check_learning_rate(lr)
        start_time = time.monotonic()
        sent = self.sharding.traffic.inter_node
        step = self.step_count + 1
        seed_run(((self._options.seed << 20) + step) * 65_537 % (1 << 62) + self._topology.rank)
        parts, items = self._forward.split(batch)
        if items == 0:
            raise UserError(
                "No token of this batch has a label (all are -100): there is nothing to learn from it."
            )
        total, aux = self._forward_and_backward(parts, items)
        loss, norm, stopping, all_sent = self._all_reduce(
            total, stop, self.sharding.traffic.inter_node - sent
        )
        try:
            check_finite(step, loss, norm, self.committed_step)
            coefficient = clip_coefficient(norm, self._options.max_grad_norm or math.inf)
            if coefficient is not None:
                torch._foreach_mul_(self._gradients(), coefficient)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        finally:
            self._optimizer.zero_grad()  # or the next step would add to it
        self.step_count = step
        seconds = time.monotonic() - start_time
        node_sent = int(all_sent / self._topology.nodes)
        return ClusterStep(step, loss, norm, stopping, seconds, node_sent, aux)

    def _forward_and_backward(
        self, parts: Sequence[dict[str, torch.Tensor]], items: int
    ) -> tuple[torch.Tensor, float | None]:
        """Compute gradients, and return this rank's part of the loss (float64 scalar) and the router loss."""
        world = self._topology.world_size
        share = torch.tensor(items / world, device=self._device)  # FSDP2 averages gradients over ranks
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        router = self._forward.router_pass(parts)
        if router is not None and len(parts) > 1:  # it is known when all of the batch has gone forward
            self._route(parts, router)
        for index, part in enumerate(parts):
            self.sharding.set_is_last_micro_batch(index == len(parts) - 1)
            with self._forward.separate_documents(part):
                # In the backward pass, too: blocks are computed again there
                output = self._forward.run(part)
                loss, gradient = cross_entropy(output.logits, part["targets"], share, gradient=True)
                total += loss / world
                if router is None:
                    output.logits.backward(gradient)
                    continue
                if len(parts) == 1:
                    router.add(0, output.router_logits or ())
                    self._forward.combine(router)
                losses = router.losses(index, output.router_logits)
                weights = [torch.full_like(each, world) for each in losses]  # of a mean over ranks, again
                torch.autograd.backward([output.logits, *losses], [gradient, *weights])
        if router is None:
            return total, None
        return total + router.share.to(self._device) / world, router.value

    @torch.no_grad()
    def _route(self, parts: Sequence[dict[str, torch.Tensor]], router: RouterPass) -> None:
        """Find the router loss of several micro-batches in a forward pass that draws the random numbers of the next."""
        states = random_states(self._device)
        for index, part in enumerate(parts):
            with self._forward.separate_documents(part):
                router.add(index, self._forward.run(part).router_logits or ())
        self._forward.combine(router)
        set_random_states(states, self._device)

    def _all_reduce(self, loss: torch.Tensor, stop: bool, sent: int) -> tuple[float, float, bool, float]:
        """Return loss and gradient norm of the batch, whether a rank wants to stop, and bytes sent, in one message."""
        copies = self.sharding.routes.replicas
        squares = sum((sum_of_squares(value.flatten()) for value in self._gradients()), loss.new_zeros(()))
        sums = torch.stack(
            [loss, squares / copies, loss.new_tensor(float(stop)), loss.new_tensor(float(sent))]
        )
        dist.all_reduce(sums)
        total, square, stops, all_sent = sums.tolist()
        return total, math.sqrt(square), stops > 0, all_sent

    def _gradients(self) -> list[torch.Tensor]:
        """Return this rank's part of every gradient."""
        gradients = [
            parameter.grad for parameter in self._model.module.parameters() if parameter.grad is not None
        ]
        return [cast(DTensor, gradient).to_local() for gradient in gradients]

    @torch.no_grad()
    def eval_loss(self, batch: Mapping[str, torch.Tensor]) -> float:
        """Return the mean loss over all labels of a batch as in :meth:`train_step`, without dropout, on every rank."""
        parts, count = self._forward.split(batch)
        items = torch.tensor(count, device=self._device)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        self._model.module.eval()
        for part in parts:
            with self._forward.separate_documents(part):
                output = self._forward.run(part)
            total += cross_entropy(output.logits, part["targets"], items, gradient=False)[0]
        self._model.module.train()
        self.sharding.reshard()  # some stay whole after a forward pass, expecting a backward pass
        dist.all_reduce(total)
        return float(total)

    def save_pretrained(self, directory: Path, *, merge: bool = False, allow_nonfinite: bool = False) -> None:
        """Export what was trained. All ranks gather, a block at a time; rank 0 writes.

        Without adapters, a Hugging Face checkpoint in the compute dtype; with them, an adapter directory of PEFT.

        Args:
            directory: shared by all nodes; files of the same names are replaced, unless a value is not finite.
            merge: also write the model with the adapters merged into it, in a folder inside.
            allow_nonfinite: also export tensors that hold a NaN or an infinity.
        """
        model = self._model
        is_rank0 = self._topology.rank == 0
        stored = model.source if isinstance(model.source, CheckpointSource) else None

        def write(folder: Path, blocks: Iterator[dict[str, torch.Tensor]], unties: bool = False) -> None:
            writer = None
            if is_rank0:
                writer = CheckpointWriter(
                    folder,
                    model.meta,
                    model.config,
                    model.dtype,
                    _SHARD_BYTES,
                    allow_nonfinite,
                    stored,
                    unties,
                )
            for named in blocks:
                if writer is not None:
                    writer.add(named)
            broadcast_from_rank0(lambda: None if writer is None else writer.finish())

        self.sharding.reshard()
        adapters = model.adapters
        if adapters is None:
            write(directory, gather_blocks(model.module, model.block_prefix, model.dtype))
            return
        if merge:  # first: if it is refused, the adapters of before stay, too
            blocks = gather_blocks(model.module, model.block_prefix, None, adapters.merge_group)
            on_cpu = ({name: value.cpu() for name, value in named.items()} for named in blocks)
            write(
                directory / MERGED,
                (adapters.merge(named) if is_rank0 else {} for named in on_cpu),
                adapters.unties,
            )
        values = {name: whole(parameter).cpu() for name, parameter in model.trained()}
        broadcast_from_rank0(lambda: adapters.save(directory, values, allow_nonfinite, model.checkpoint))

    def planned_sent_bytes(self, rows: int) -> float:
        """Return the bytes that a node sends in a step of ``rows`` sequences by the formulas, after the first."""
        routed = self._model.router_loss is not None
        return self.sharding.inter_node_bytes(self._forward.micro_batches(rows), router_loss=routed)

    def model_flops_per_token(self, seq_len: int) -> float:
        """Return 6 FLOPs per parameter and token, 4 per frozen one, plus attention's; recomputation is not counted."""
        meta = self._model.meta
        flops = model_flops_per_token(meta, seq_len)
        if self._model.adapters is not None:  # their own, less the gradients of frozen weights
            flops += 6.0 * self.trainable_parameters - 2.0 * active_parameters(meta, meta)
        return flops

    @property
    def device_peak_bytes(self) -> int:
        """Most device memory in use by this rank; 0 where the CPU computes."""
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else 0

    def close(self) -> None:
        """Let go of host memory and of the commits. On every rank, before ``Topology.close()``."""
        self.checkpoints.close()
        self.sharding.close()
        self.meter.stop()


def _make_optimizer(model: ClusterModel, config: TrainerConfig) -> torch.optim.AdamW:
    """Return AdamW over what is trained, with moments of zero, which commits can be loaded into."""
    decayed = decayed_parameters(model.module)
    groups: list[dict[str, Any]] = []
    for decays in (True, False):
        parameters = [parameter for name, parameter in model.trained() if (name in decayed) is decays]
        if parameters:
            groups.append({"params": parameters, "weight_decay": config.weight_decay if decays else 0.0})
    optimizer = torch.optim.AdamW(groups, betas=config.betas, eps=config.eps, fused=True)
    for _, parameter in model.trained():  # as AdamW would at its first step
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def _pin_threads(topology: Topology) -> tuple[int, ...] | None:
    """Pin this process to its share of the cores of its GPU's NUMA node (FCDP IV-D), and return them. Collective."""
    everyone = all_gather_object((topology.node, numa.node_of(topology.device)))
    nodes = [numa_node for node, numa_node in everyone if node == topology.node]
    cores = numa.cores_for(nodes, topology.local_rank, os.sched_getaffinity(0))
    if cores is not None:
        numa.pin(cores)
    return cores
