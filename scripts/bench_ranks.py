"""One cluster of ranks that train out of core: step time and bytes, next to what planner and formulas say.

    python scripts/netcluster.py up --nodes 2 --ranks 2 -- python scripts/bench_ranks.py --model llama-10m
    python scripts/netcluster.py up --nodes 4 -- python scripts/bench_ranks.py --model gpt2-125m --batch 2 --device \
        emulated:tflops=100,memory=8GiB,link=25GB/s,ssd_read=400MB/s,ssd_write=300MB/s,inside=25GB/s,across=1.25GB/s

Every rank makes its store in a separate folder inside `--folder`. Bytes of the SSDs are what the stores count, bytes
of the network what the node's device counts, headers taken off, both over all steps but the first two. On an emulated
accelerator the step is also simulated, with the accelerator's own figures; there the network is emulated as well, and
nothing but meetings goes over the real one. Rank 0 prints one line of JSON.
"""

import json
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import common  # noqa: F401  (before PyTorch, which reads how threads wait)

# isort: split

import click
import torch
import torch.distributed as dist
from emulated.device import PREFIX, EmulatedDevice, emulated_device
from netcluster import network_bytes

import fcdp
import fuyou
from common.communication import all_gather_object
from common.models.adapters.options import AdapterOptions
from fuyou.planner import describe_training
from fuyou.planner.simulator import TaskRates, simulate
from fuyou.runtime.ranks import share_of

WARM_UP = 2  # Steps that are not counted: the first one finds empty buffers


@click.command()
@click.option("--model", default="llama-10m", help="Preset.")
@click.option("--batch", default=1, help="Sequences of each rank.")
@click.option("--seq-len", default=64)
@click.option("--steps", default=6)
@click.option("--device", default="cpu")
@click.option("--lora-rank", type=int, help="Train adapters of this rank instead of the weights.")
@click.option("--host-memory", default="3GiB", help="Of each rank.")
@click.option("--adam", default=4e8, help="Parameters per second of the optimizer, for the simulation.")
@click.option("--folder", type=click.Path(path_type=Path), default=Path("/tmp/bench-ranks"))
def main(
    model: str, batch: int, seq_len: int, steps: int, device: str, lora_rank: int | None, host_memory: str,
    adam: float, folder: Path,
) -> None:  # fmt: skip
    dist.init_process_group("gloo")
    topology = fcdp.Topology.from_environment()
    store = folder / f"rank-{topology.rank}"
    shutil.rmtree(store, ignore_errors=True)
    store.mkdir(parents=True)
    adapters = AdapterOptions(lora_rank) if lora_rank is not None else None
    emulated = emulated_device(device) if device.startswith(PREFIX) else None
    engine = fuyou.Engine(
        model, ssd=[store], device=emulated or device, dtype="bf16", topology=topology, host_cache=0,
        batch_shape=(batch, seq_len), adapters=adapters,
        host_memory=f"{int(host_memory.removesuffix('GiB')) * topology.ranks_per_node}GiB",
    )  # fmt: skip
    with engine:
        seconds, moved, listed, sent = train(engine, topology, batch, seq_len, steps)
        facts = report(engine, topology, model, emulated, adam, adapters)
    everyone = all_gather_object((*moved, *listed))
    if topology.rank == 0:
        read, written, listed_read, listed_written = map(
            sum, zip(*everyone[: topology.ranks_per_node], strict=True)
        )
        print(json.dumps({
            "model": model, "nodes": topology.nodes, "ranks_per_node": topology.ranks_per_node, "lora_rank": lora_rank,
            "step_seconds": round(statistics.median(seconds), 3), "read_bytes": read, "written_bytes": written,
            "network_bytes": sent, "listed_read": listed_read, "listed_written": listed_written, **facts,
        }), flush=True)  # fmt: skip
    shutil.rmtree(store)
    topology.close()
    dist.destroy_process_group()


def train(
    engine: fuyou.Engine, topology: fcdp.Topology, rows: int, seq_len: int, steps: int
) -> tuple[list[float], list[float], list[float], float]:
    """Seconds of each counted step; per step SSD bytes of this rank, counted and as the schedule lists them, and the
    network bytes of its node."""
    seconds = []
    before, began_network, began = (0, 0, 0, 0), 0, time.monotonic()
    for step in range(steps + WARM_UP):
        if step == WARM_UP:
            engine.flush()
            dist.barrier()
            before, began_network = (*engine.io_bytes(), *engine.planned_io_bytes()), payload(topology)
        generator = torch.Generator().manual_seed(step * topology.world_size + topology.rank)
        ids = torch.randint(0, engine.config.vocab_size, (rows, seq_len), generator=generator)
        engine(input_ids=ids, labels=ids).loss.backward()
        engine.step()
        began, ended = time.monotonic(), began
        if step > WARM_UP:
            seconds.append(began - ended)
    engine.flush()
    dist.barrier()
    now = (*engine.io_bytes(), *engine.planned_io_bytes())
    moved = [(after - earlier) / steps for after, earlier in zip(now, before, strict=True)]
    return seconds, moved[:2], moved[2:], (payload(topology) - began_network) / steps


def payload(topology: fcdp.Topology) -> int:
    """Bytes that this node has sent to others, without headers; 0 where there are no others."""
    return network_bytes().sent_payload if topology.nodes > 1 else 0


def report(
    engine: fuyou.Engine, topology: fcdp.Topology, model: str, emulated: EmulatedDevice | None, adam: float,
    adapters: AdapterOptions | None,
) -> dict[str, Any]:  # fmt: skip
    """What formulas and simulation say, of a node."""
    nodes, total, trained = topology.nodes, engine.parameters, engine.trainable_parameters
    if trained < total:
        # What is frozen is read twice; adapters in fp32, kept in host memory, are only written
        read, written = 2.0 * 2 * (total - trained), (4 + 8 / nodes) * trained
        sent = 8 * trained * (nodes - 1) / nodes
    else:
        read, written = (4 + 10 / nodes) * total, (2 + 10 / nodes) * total
        sent = 4 * total * (nodes - 1) / nodes
    facts: dict[str, Any] = {
        "parameters": total, "trainable": trained, "formula_read": round(read), "formula_written": round(written),
        "formula_network": round(sent),
    }  # fmt: skip
    if emulated is not None:
        spec = emulated.spec
        assert spec.throttle is not None
        rates = TaskRates(
            spec.flops_per_second, spec.link_bytes_per_second, spec.link_bytes_per_second,
            spec.throttle.read_bytes_per_second, spec.throttle.write_bytes_per_second, adam,
            intra_node_bytes_per_second=spec.intra_node_bytes_per_second or float("inf"),
            inter_node_bytes_per_second=spec.inter_node_bytes_per_second or float("inf"), message_seconds=1e-3,
        )  # fmt: skip
        batch = engine.memory_plan.batch
        frozen = adapters.peft_config() if adapters is not None else None
        layout = describe_training(model, batch.rows, batch.seq_len, adapters=frozen).layout.shared(
            share_of(topology)
        )
        facts["simulated_seconds"] = round(simulate(layout, engine.memory_plan, rates).step_seconds(), 3)
    return facts


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
