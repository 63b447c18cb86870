"""What our planner says of every case in ``figures.toml``.

A system that a paper built into DeepSpeed, and every baseline in it, is planned as DeepSpeed runs: parameters are
gathered, and gradients reduced, tensor by tensor, and nothing computes while it reduces. Its share of the peak is that
of AMSP's cell on one node. AMSP's engine gathers by module and overlaps everything (V-C)."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from common.models.meta_model import build_meta_model
from common.models.presets import load_config
from fcdp.planner import Cluster, Engine, Estimate, Workload, estimate, load_cluster
from fcdp.strategy.mesh import Levels, Mesh
from fcdp.strategy.strategy import PRESETS, Strategy, parse_strategy
from published.engines import OtherEngine

# DeepSpeed keeps smaller tensors whole (stage3_param_persistence_threshold), and sends gradients and new parameters of
# stages 1 and 2 in buckets of 5e8 numbers (reduce_bucket_size, allgather_bucket_size): its documentation's defaults.
SMALLEST_TENSOR = 100_000
BUCKET_BYTES = 2 * 5e8


@dataclass(frozen=True)
class Run:
    """One planned run."""

    cluster: Cluster
    workload: Workload
    engine: Engine
    checkpointing: bool = False

    def plan(self, strategy: Strategy) -> Estimate:
        """Return what the planner says."""
        layout = strategy.on(self.cluster.levels)
        return estimate(
            layout, self.workload, self.cluster, checkpointing=self.checkpointing, engine=self.engine
        )


@cache
def tensors(model: str) -> int:
    """Return the number of tensors that DeepSpeed gathers, each alone."""
    meta = build_meta_model(load_config(model)[0])
    return sum(parameter.numel() >= SMALLEST_TENSOR for parameter in meta.parameters())


def deepspeed(model: str) -> Engine:
    """DeepSpeed's stage 3 and what is built on it: gathers are prefetched, reductions wait (AMSP VI-C). A block that is
    computed again is gathered for it, with ZeRO++ from all ranks as in the forward pass (its hook is the forward's)."""
    return OtherEngine(tensors(model), BUCKET_BYTES, frozenset({"gather"}), gathers_again=True)


# DeepSpeed's stages 1 and 2 all-reduce buckets. AMSP turned their overlap on (VI-A4); it is off by default.
STAGE_1 = OtherEngine(0, BUCKET_BYTES, frozenset({"scatter", "reduce"}), select_and_drop=True)
STAGE_2 = OtherEngine(0, BUCKET_BYTES, frozenset(), select_and_drop=True)


# AMSP's engine; its comparison with others leaves the broadcast alone (VI-A4).
AMSP_OVERLAPS = {
    "all": frozenset({"gather", "scatter", "reduce", "spread"}),
    "no broadcast": frozenset({"gather", "scatter", "reduce"}),
    "gathers": frozenset({"gather", "scatter"}),
    "nothing": frozenset[str](),
}


def amsp_engine(model: str, overlaps: str = "no broadcast") -> Engine:
    """AMSP's engine: a module at a time (IV-C1)."""
    return OtherEngine(tensors(model), BUCKET_BYTES, AMSP_OVERLAPS[overlaps], select_and_drop=True)


cluster_of = cache(load_cluster)


@cache
def _workload(model: str, seq_len: int, trainable: float) -> Workload:
    return Workload.of_model(load_config(model)[0], seq_len=seq_len, trainable_ratio=trainable)


def workload_of(
    model: str, seq_len: int, *, micro_batch: int = 1, micro_batches: int = 1, trainable: float = 1.0
) -> Workload:
    """A model's workload; gradients are summed in two bytes, as in the papers' tables."""
    workload = _workload(model, seq_len, trainable)
    return replace(workload, micro_batch=micro_batch, micro_batches=micro_batches, deepspeed_states=True)


def at_share(cluster: Cluster, share: float) -> Cluster:
    """Return a cluster on which an engine reaches another share of the peak."""
    assert cluster.peak_flops_per_second is not None
    return replace(cluster, flops_per_second=share * cluster.peak_flops_per_second, compute=None)


def share_for(mfu: float, case: Callable[[float], float]) -> float:
    """Return the share of the peak at which a case is planned at this MFU."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if case(middle) < mfu else (low, middle)
    return middle


def strategy_of(name: str) -> Strategy:
    """Return a strategy as the papers run it: ZeRO++ without quantization, over NCCL's rings."""
    return replace(PRESETS["zero++-exact"], ring="flat") if name == "zero++" else parse_strategy(name)


# AMSP

AMSP_SYSTEMS = {
    "LLaMA-7B": {"amsp": "amsp-7b", "mics": "mics"},
    "LLaMA-13B": {"amsp": "amsp-13b", "mics": "mics"},
    "LLaMA-30B": {"amsp": "amsp-30b", "mics": "8x2/8x2/8x2"},
}  # table IV


def amsp_mfu(
    model: str, system: str, gpus: int, engine: Engine, share: float, micro_batches: int = 0
) -> float:
    name = AMSP_SYSTEMS[model].get(system, system)
    preset = model.lower()
    cluster = at_share(cluster_of("a800-hdr").resized(Levels((8, gpus // 8))), share)
    workload = workload_of(preset, 4096, micro_batches=micro_batches or 1024 // gpus)
    planned = Run(cluster, workload, engine, model == "LLaMA-30B").plan(strategy_of(name))
    assert planned.mfu is not None
    return 100 * planned.mfu


@cache
def amsp_share(system: str) -> float:
    """Shares of the peak from figure 11's cells on one node: AMSP's engine, and DeepSpeed's stages 1 and 3."""
    cell = {"amsp": 64.0, "zero1": 63.0, "mics": 50.0}[system]
    engine = {"amsp": amsp_engine("llama-7b"), "zero1": STAGE_1}.get(system, deepspeed("llama-7b"))
    return share_for(cell, lambda share: amsp_mfu("LLaMA-7B", system, 8, engine, share))


def amsp_figure_11(case: str, system: str) -> float:
    model, gpus = case.split(", ")
    engine = {"amsp": amsp_engine(model.lower()), "zero1": STAGE_1}.get(system, deepspeed(model.lower()))
    share = amsp_share(system if system in ("amsp", "zero1") else "mics")
    return amsp_mfu(model, system, int(gpus.split()[0]), engine, share)


def amsp_figure_16(case: str, system: str) -> float:
    mfu, mics = (
        amsp_mfu(case, name, 1024, amsp_engine(case.lower()), amsp_share("amsp")) for name in (system, "mics")
    )
    return mfu / mics


def amsp_table_v(case: str, system: str) -> float:
    model, micro_batches = case.split(", M = ")
    return amsp_mfu(
        model, "amsp", 64, amsp_engine(model.lower(), system), amsp_share("amsp"), int(micro_batches)
    )


def amsp_figure_13(case: str, system: str) -> float:
    model, gpus = case.split(", ")
    nodes = int(gpus.split()[0]) // 8
    cluster = cluster_of("a800-hdr").resized(Levels((8, nodes)))
    workload = workload_of(model.lower(), 4096, micro_batches=128 // nodes)
    return Run(cluster, workload, Engine(), True).plan(PRESETS[system]).memory.device / 1e9


# PaRO


def paro_figure_6(case: str, system: str) -> float:
    """Ten micro-batches of 4 x 512 tokens; 65B recomputes activations (4.2)."""
    model, gpus, *_ = case.split(", ")
    preset = model.lower()
    baseline = "zero2" if case.endswith("ZeRO-2") else "zero3"
    share = amsp_share("zero1" if baseline == "zero2" else "mics")
    cluster = at_share(cluster_of("a100-ib").resized(Levels((8, int(gpus.split()[0]) // 8))), share)
    workload = workload_of(preset, 512, micro_batch=4, micro_batches=10)

    def seconds(name: str) -> float:
        # HO-Ring is measured alone (4.4): here everything is NCCL's.
        strategy = replace(PRESETS[name], ring="flat" if name != "mics" else "hierarchical")
        stage_2 = replace(STAGE_2, select_and_drop=name == "zero2")
        engine = stage_2 if baseline == "zero2" else deepspeed(preset)
        return Run(cluster, workload, engine, model == "LLaMA-65B").plan(strategy).step_seconds

    return seconds(baseline) / seconds(system)


def paro_figure_8(case: str, system: str) -> float:
    """An all-gather of 1 GB of each of 16 nodes: read as 1 GB in all, the network would move 3.4 GB/s of its 100."""
    ring = {"flat ring": "flat", "hierarchical ring": "hierarchical", "HO-Ring": "ho"}[system]
    rates = cluster_of("a100-ib").rates
    return 1e3 * rates.seconds("all_gather", Mesh((8, 16)), 16e9, ring)  # type: ignore[arg-type]


def paro_table_3(case: str, system: str) -> float:
    """Bytes of the whole cluster, a two-byte element as the unit."""
    levels = Levels((8, 8))
    workload = Workload(7e9, 7e9, blocks=32, micro_batches=8, deepspeed_states=True)
    planned = Run(cluster_of("a100-ib").resized(levels), workload, Engine()).plan(strategy_of(system))
    return planned.inter_node_bytes * levels.nodes / 2 / workload.parameters


# FCDP

NETWORKS = {"RDMA": "a40-edr", "IPoIB": "a40-ipoib", "10GbE": "a40-10gbe", "1 Gbit/s": "a40-1gbe"}
FCDP_MODELS = ("GPT-10B", "GPT-15B", "GPT-20B", "GPT-25B", "GPT-30B")
# Not in the paper; of 256, 384 and 512, with which tables V and VI agree best.
FCDP_TOKENS = 256
# Measured over the formula: 40.92 - 34.06 GB (III-B) for the 2 bytes of 16.2 B parameters over eight GPUs.
SECOND_SHARDS = 6.86 / 4.05
# As DeepSpeed gathers: over all ranks at once. With LoRA, what is frozen stays in the node's cache.
FCDP_SYSTEMS = {"fcdp": "G/G/G+adaptive+second", "fcdp-sched": "G/G/G+host+second", "fcdp-comm": "I/G/G+host"}
FCDP_LORA_SYSTEMS = FCDP_SYSTEMS | {"fcdp": "I/G/G+adaptive"}


def fcdp_strategy(system: str, systems: dict[str, str]) -> Strategy:
    strategy = strategy_of(systems.get(system, system))
    return replace(strategy, ring="flat") if strategy.secondary else strategy


def fcdp_run(
    model: str, system: str, nodes: int, network: str, *, sequences: int = 8, trainable: float = 1.0
) -> tuple[Estimate, float]:
    """The plan of a step, and sequences per second of all ranks."""
    preset = model.lower()
    cluster = cluster_of(NETWORKS[network]).resized(Levels((2, 4, nodes)))
    cluster = at_share(cluster, amsp_share("mics"))
    workload = workload_of(preset, FCDP_TOKENS, micro_batch=sequences, trainable=trainable)
    planned = Run(cluster, workload, deepspeed(preset)).plan(
        fcdp_strategy(system, FCDP_SYSTEMS if trainable == 1 else FCDP_LORA_SYSTEMS)
    )
    return planned, 8 * nodes * sequences / planned.step_seconds


def fcdp_figure_2(case: str, system: str) -> float:
    model, gpus, network = case.split(", ")
    return fcdp_run(model, system, int(gpus.split()[0]) // 8, network)[1]


def fcdp_figure_5(case: str, system: str) -> float:
    """The best of all sizes and both numbers of nodes, at 8 sequences."""
    runs = ((model, nodes) for model in FCDP_MODELS for nodes in (2, 4))
    return max(fcdp_run(m, system, n, "RDMA")[1] / fcdp_run(m, "zero3", n, "RDMA")[1] for m, n in runs)


def fcdp_fits(model: str, system: str, nodes: int, sequences: int, trainable: float) -> bool:
    """Whether it fits, second shards of DeepSpeed's ZeRO++ as large as III-B measured them."""
    planned, _ = fcdp_run(model, system, nodes, "RDMA", sequences=sequences, trainable=trainable)
    extra = (SECOND_SHARDS - 1) * planned.memory.secondary
    return planned.memory.device + extra <= cluster_of("a40-edr").device_memory_bytes


def fcdp_largest(model: str, system: str, nodes: int, trainable: float = 1.0) -> int:
    """The largest power of two of sequences per GPU that fits, for all GPUs."""
    sequences = 1
    while fcdp_fits(model, system, nodes, 2 * sequences, trainable):
        sequences *= 2
    return 8 * nodes * sequences if fcdp_fits(model, system, nodes, sequences, trainable) else 0


def fcdp_figure_6(case: str, system: str) -> float:
    """Throughputs at each system's largest batch."""
    model = case.split(", ")[0]
    baseline = "zero3" if model == "GPT-10B" else "zero++"

    def throughput(name: str) -> float:
        sequences = fcdp_largest(model, name, 4) // 32
        return fcdp_run(model, name, 4, "RDMA", sequences=sequences)[1]

    return throughput(system) / throughput(baseline)


def fcdp_tables(nodes: int) -> Callable[[str, str], float]:
    return lambda case, system: float(fcdp_largest(case, system, nodes))


# Trainable parameters over all. The text has 1 % (V-D), but 0.06 GB in table VII's forward, two bytes each from one
# node to the other and back, are 30 M.
LORA = 30e6 / 30e9


def fcdp_lora(case: str, system: str) -> float:
    """The best of all sizes, at 8 sequences (figure 7) and at the largest batch of each system (figure 8)."""
    baseline = "zero++" if case.endswith("ZeRO++") else "zero3"

    def throughput(model: str, name: str, is_largest: bool) -> float:
        sequences = fcdp_largest(model, name, 2, LORA) // 16 if is_largest else 8
        return (
            fcdp_run(model, name, 2, "RDMA", sequences=sequences, trainable=LORA)[1]
            if sequences
            else math.inf
        )

    return max(
        throughput(model, system, is_largest) / throughput(model, baseline, is_largest)
        for model in FCDP_MODELS
        for is_largest in (False, True)
    )


def fcdp_figure_9(case: str, system: str) -> float:
    def throughput(name: str, network: str) -> float:
        return fcdp_run("GPT-10B", name, 2, network, trainable=LORA)[1]

    if "over" in case:
        return throughput(system, "1 Gbit/s") / throughput(
            "zero3" if "ZeRO-3" in case else "zero++", "1 Gbit/s"
        )
    return 100 * throughput(system, case) / throughput(system, "RDMA")


def fcdp_table_vii(case: str, system: str) -> float:
    """GPT-30B's bytes, of both nodes."""
    planned, _ = fcdp_run("GPT-30B", system, 2, "RDMA", sequences=1, trainable=LORA)
    cluster = cluster_of("a40-edr").resized(Levels((2, 4, 2)))
    total = 0.0
    for collective in planned.collectives:
        if case == "total" or collective.phase == case:
            total += 2 * cluster.levels.ranks_per_node * collective.sent_by_rank()[-1]
    return total / 1e9


def fcdp_memory(case: str, system: str) -> float:
    memory = fcdp_run(case, system, 2, "RDMA")[0].memory
    return (memory.device + (SECOND_SHARDS - 1) * memory.secondary) / 1e9


# ZeRO-topo


def topo_run(system: str, nodes: int) -> Estimate:
    """A step of GPT-NeoX-20B with four sequences per GCD, one at a time.

    The paper has no batch. 1,538 sequences are what the model was trained with (Black et al. 2022): four on each of 384
    GCDs. With all four at once computing would take 20 s, and no network of 100 GB/s explains a factor of 2.4."""
    model = "gpt-neox-20b"
    cluster = cluster_of("frontier").resized(Levels((2, 4, nodes)))
    workload = workload_of(model, 2048, micro_batches=4)
    strategy = replace(PRESETS[system], ring="flat")
    return Run(cluster, workload, deepspeed(model), checkpointing=True).plan(strategy)


def topo_figure_7(case: str, system: str) -> float:
    baseline = topo_run(system, 2) if case == "efficiency" else topo_run("zero3", 48)
    return baseline.step_seconds / topo_run(system, 48).step_seconds


FIGURES: dict[tuple[str, str], Callable[[str, str], float]] = {
    ("AMSP", "11"): amsp_figure_11,
    ("AMSP", "13"): amsp_figure_13,
    ("AMSP", "16"): amsp_figure_16,
    ("AMSP", "table V"): amsp_table_v,
    ("FCDP", "2"): fcdp_figure_2,
    ("FCDP", "5"): fcdp_figure_5,
    ("FCDP", "6"): fcdp_figure_6,
    ("FCDP", "7 and 8"): fcdp_lora,
    ("FCDP", "9"): fcdp_figure_9,
    ("FCDP", "III-B"): fcdp_memory,
    ("FCDP", "table V"): fcdp_tables(2),
    ("FCDP", "table VI"): fcdp_tables(4),
    ("FCDP", "table VII"): fcdp_table_vii,
    ("PaRO", "6"): paro_figure_6,
    ("PaRO", "8"): paro_figure_8,
    ("PaRO", "table 3"): paro_table_3,
    ("ZeRO-topo", "7"): topo_figure_7,
}
