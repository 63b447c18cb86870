"""Memory, step time and choice, against the papers' formulas and against exhaustive checks."""

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import MixtralConfig

from common.errors import UserError
from common.models.presets import load_config
from fcdp.planner import Cluster, Workload, admissible, cluster_names, estimate, load_cluster, plan
from fcdp.planner.cluster import groups_across_leaves, node_order, nodes_per_switch
from fcdp.planner.cost import OVERLAP, RUNTIME_BYTES, memory_of
from fcdp.planner.search import SAME
from fcdp.strategy.mesh import Levels, Mesh
from fcdp.strategy.strategy import PRESETS, parse_strategy

PSI = 8e9
WORKLOAD = Workload(
    PSI, PSI, blocks=31, forward_flops_per_token=2 * PSI, weight_flops_per_token=2 * PSI, seq_len=4096
)


def dgx(nodes: int = 4) -> Cluster:
    return load_cluster("a800-hdr").resized(Levels((8, nodes)))


@pytest.mark.parametrize(("name", "parameters", "secondary", "gradients", "optimizer", "host"), [
    # Per parameter on 8 x 4 ranks, two micro-batches: P where it is cached or not sharded; sums in fp32 over G's scope,
    # if OS's is wider or has replicas, and the optimizer's gradients.
    ("ddp", 2, 0, 4 + 4, 12, 0),
    ("zero1", 2, 0, 4 + 4 / 32, 12 / 32, 0),
    ("zero2", 2, 0, 4 / 32, 12 / 32, 0),
    ("zero3", 0, 0, 4 / 32, 12 / 32, 0),
    ("mics", 0, 0, 4 / 8 + 4 / 8, 12 / 8, 0),
    ("zero++-exact", 0, 2 / 8, 4 / 32, 12 / 32, 0),
    ("paro-igg", 2 / 8, 0, 4 / 32, 12 / 32, 0),
    ("paro-nig", 2, 0, 4 / 8 + 4 / 32, 12 / 32, 0),
    ("fcdp", 0, 0, 4 / 32, 12 / 32, 2),
    ("fcdp-iig", 0, 0, 4 / 8 + 4 / 32, 12 / 32, 2),
    ("G/G/G+host+second", 0, 0, 4 / 32, 12 / 32, 2),
])  # fmt: skip
def test_states_are_those_that_fsdp2_holds(
    name: str, parameters: float, secondary: float, gradients: float, optimizer: float, host: float
) -> None:
    layout = parse_strategy(name).on(Levels((8, 4)))
    memory = memory_of(layout, replace(WORKLOAD, micro_batches=2), checkpointing=False)
    states = [memory.parameters, memory.secondary, memory.gradients, memory.optimizer, memory.host]
    assert states == pytest.approx(
        [PSI * each for each in (parameters, secondary, gradients, optimizer, host)]
    )


@pytest.mark.parametrize(("model", "nodes"), [("gpt-20b", 2), ("gpt-30b", 4)])
def test_fcdp_fits_where_its_paper_runs(model: str, nodes: int) -> None:
    """Section V-B, Result 2: on nodes of eight A40, as ZeRO-3 does."""
    workload = Workload.of_model(load_config(model)[0], seq_len=256, micro_batch=8)
    cluster = load_cluster("a40-edr").resized(Levels((2, 4, nodes)))
    estimates = plan(
        workload, cluster, strategies=[PRESETS["fcdp"], PRESETS["zero3"]], checkpointing=False
    ).estimates
    assert all(estimate.fits for estimate in estimates)
    least, most = sorted(estimate.memory.device for estimate in estimates)
    assert most <= 1.03 * least, "gathers from the other pairs of a node go through separate memory"


@pytest.mark.parametrize(("name", "scratch"), [
    # Of a block in bf16 on 8 x 4 ranks: what arrives, and this rank's own.
    ("zero3", 0.0),  # a flat ring over ranks in order
    ("ddp", 0.0),
    ("mics", 0.0),  # inside nodes alone
    ("fcdp", 0.0),  # between nodes only in the forward pass, before there are gradients
    ("zero++", 0.0),
    ("G/G/G", 1 / 8 * (1 + 1 / 4)),  # between nodes: ranks 8 apart
    ("zero-topo", (1 + 4 / 256) / 2),  # in int8, next to the whole block
    ("paro-ggg", 0.0),  # HO-Ring
])  # fmt: skip
def test_strided_and_quantized_gathers_take_separate_memory(name: str, scratch: float) -> None:
    layout = parse_strategy(name).on(Levels((2, 4, 4) if name == "zero-topo" else (8, 4)))
    memory, block = memory_of(layout, WORKLOAD, checkpointing=False), PSI / WORKLOAD.units
    gathered = 2 * 2 * block if layout.p.shards > 1 else 0.0
    assert memory.working - RUNTIME_BYTES - gathered - 2 * 2 * block == pytest.approx(
        2 * block * scratch, abs=1.0
    )


def test_frozen_parameters_have_neither_gradients_nor_states() -> None:
    adapters = replace(WORKLOAD, trainable=PSI / 100, micro_batches=2)
    memory = memory_of(PRESETS["mics"].on(Levels((8, 4))), adapters, checkpointing=False)
    assert (memory.parameters, memory.gradients + memory.optimizer) == pytest.approx(
        (0.99 * PSI / 4, 0.2 * PSI / 8)
    )


def test_activations_of_llama_7b() -> None:
    """By hand, per token and block: 2 norms, attention's input, q, k, v and result, the MLP's input and 4 times its
    inner width, 2 bytes each; the loss has 10 bytes for each of 32,000 words."""
    workload = Workload.of_model(load_config("llama-7b")[0], seq_len=4096, micro_batch=2)
    tokens, block = 2 * 4096, 2 * (2 * 4096 + 5 * 4096 + 4096 + 4 * 11008)
    assert workload.parameters == 6_738_415_616
    assert workload.activation_bytes(False) == tokens * (32 * block + 10 * 32000)
    assert workload.activation_bytes(True) == tokens * (32 * 2 * 4096 + block + 10 * 32000)
    ungated = Workload.of_model(load_config("gpt2-125m")[0], seq_len=8)
    assert ungated.block_activation_bytes == 32 * 768, "Korthikanti's 34 without two bytes of dropout masks"


def test_the_router_loss_of_several_micro_batches_takes_a_forward_pass_of_each_more() -> None:
    layout, kept = PRESETS["zero3"].on(Levels((8, 4))), 1e9
    plain = replace(WORKLOAD, micro_batches=3, kept_gathered=kept)
    routed = replace(plain, router_loss=True)
    for overlaps in (True, False):
        cluster = replace(dgx(), overlaps=overlaps)
        without, result = (estimate(layout, each, cluster, checkpointing=True) for each in (plain, routed))
        (gather,) = set(result.collectives) - set(without.collectives)
        assert (gather.operation, gather.nbytes, gather.times) == ("all_gather", 2 * (PSI - kept), 3)
        forward = 2 * PSI * 4096 / cluster.flops_per_second + 4 * PSI / cluster.memory_bytes_per_second
        assert result.compute_seconds - without.compute_seconds == pytest.approx(3 * forward)
        sent = result.communication_seconds - without.communication_seconds
        hidden = OVERLAP * min(3 * forward, sent) if overlaps else 0.0
        assert result.step_seconds - without.step_seconds == pytest.approx(3 * forward + sent - hidden)
        assert result.memory == without.memory
    single = [
        estimate(layout, replace(each, micro_batches=1), dgx(), checkpointing=True)
        for each in (plain, routed)
    ]
    assert single[0] == single[1]


@pytest.mark.parametrize(("router_loss", "planned"), [("auto", True), ("off", False)])
def test_a_configured_router_loss_is_planned(router_loss: str, planned: bool) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, output_router_logits=True)
    workload = Workload.of_model(config, seq_len=8, micro_batches=2, router_loss=router_loss)
    assert workload.router_passes == (2 if planned else 0)
    with pytest.raises(UserError, match="LlamaForCausalLM has no router loss"):
        Workload.of_model(load_config("llama-10m")[0], seq_len=8, router_loss="on")


def test_host_cache_is_read_at_every_use_and_an_adaptive_one_only_for_want_of_room() -> None:
    slow_host = replace(dgx(), host_link_bytes_per_second=1e9)
    idle = replace(WORKLOAD, forward_flops_per_token=0, weight_flops_per_token=0)
    host, adaptive, device = (
        estimate(parse_strategy(f"I/G/G+{tier}").on(Levels((8, 4))), idle, slow_host, checkpointing=False)
        for tier in ("host", "adaptive", "device")
    )
    update = 28 * PSI / 32 / slow_host.memory_bytes_per_second
    assert host.step_seconds == pytest.approx(2 * 2 * PSI / 8 / 1e9 + update), (
        "both passes wait for copies alone"
    )
    assert adaptive.step_seconds == pytest.approx(device.step_seconds), "80 GB have room for all shards"
    assert adaptive.memory.device == host.memory.device, "what is promised is ZeRO-3's"
    tight = replace(slow_host, device_memory_bytes=round(host.memory.device))
    never = replace(idle, cache_threshold=0.0)
    for squeezed in (
        estimate(adaptive.layout, idle, tight, checkpointing=False),
        estimate(adaptive.layout, never, slow_host, checkpointing=False),
    ):
        assert squeezed.step_seconds == pytest.approx(host.step_seconds)


def test_the_space_has_every_admissible_triple_once() -> None:
    levels = Levels((4, 4))
    result = [strategy.on(levels) for strategy in admissible(levels)]
    scopes = [(1, 1), (2, 1), (4, 1), (4, 2), (4, 4)]
    triples = {(p, g, os) for p in scopes for g in scopes for os in scopes if p <= g <= os}
    plain = {(one.p.pair, one.g.pair, one.os.pair) for one in result if one.secondary is None}
    paro = {
        ((4, 1), (1, 1), (4, 1)),
        ((4, 1), (1, 1), (4, 4)),
        ((4, 4), (1, 1), (4, 4)),
        ((4, 4), (4, 1), (4, 4)),
    }
    assert plain == triples | paro
    keys = [
        (one.p, one.g, one.os, one.secondary, one.cache, one.strategy.precision, one.strategy.ring)
        for one in result
    ]
    assert len(keys) == len(set(keys))
    for strategy in admissible(levels):
        assert parse_strategy(strategy.name).on(levels) == strategy.on(levels), "names mean what was costed"


def test_the_choice_is_the_fastest_that_fits_and_changes_no_arithmetic() -> None:
    workload = Workload.of_model(load_config("llama-13b")[0], seq_len=2048, micro_batches=2)
    cluster = load_cluster("a40-10gbe")
    result = plan(workload, cluster)
    assert result.choice is not None
    eligible = [one for one in result.estimates if one.fits and one.layout.strategy.precision.exact]
    fastest = min(one.step_seconds for one in eligible)
    near = [one for one in eligible if one.step_seconds <= fastest * (1 + SAME)]
    assert result.choice in near
    assert result.choice.communication_seconds == min(one.communication_seconds for one in near)
    for one in result.estimates:
        assert one.fits == (
            one.memory.device <= cluster.device_memory_bytes and one.memory.host <= cluster.host_memory_bytes
        )
    quantized = plan(workload, cluster, allow_quantized=True).choice
    assert quantized is not None
    assert quantized.step_seconds <= result.choice.step_seconds


@pytest.mark.parametrize("name", cluster_names())
def test_presets_load_and_faster_levels_are_faster(name: str) -> None:
    cluster = load_cluster(name)
    rates = [link.bytes_per_second for link in cluster.rates.links]  # type: ignore[attr-defined]
    assert rates == sorted(rates, reverse=True)
    fewer = cluster.resized(Levels((*cluster.levels.sizes[:-2], cluster.levels.sizes[-2] // 2, 2)))
    assert fewer.rates.links[-1].bytes_per_second == 2 * rates[-1], "half the ranks share a node's cards"  # type: ignore[attr-defined]


def test_names_and_shapes_of_clusters_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Did you mean 'a800-hdr'"):
        load_cluster("a800-hrd")
    with pytest.raises(UserError, match="3 levels"):
        load_cluster("frontier").resized(Levels((8, 4)))
    mine = tmp_path / "mine.toml"
    mine.write_text("name = 'x'\n")
    with pytest.raises(UserError, match="does not describe a cluster: KeyError"):
        load_cluster(str(mine))


def test_fcdps_measured_rates() -> None:
    """Table III: 16 GB gathered over two nodes took 0.949, 3.963, 6.745 and 67.66 s."""
    for name, seconds in (
        ("a40-edr", 0.949),
        ("a40-ipoib", 3.963),
        ("a40-10gbe", 6.745),
        ("a40-1gbe", 67.66),
    ):
        cluster = load_cluster(name).resized(Levels((2, 4, 2)))
        nbytes = 16e9 / 8  # a rank's part of what the node gathers from the other
        assert cluster.rates.seconds("all_gather", Mesh((1, 1, 2)), nbytes, "flat") == pytest.approx(
            seconds, rel=0.01
        )


def test_nodes_under_one_leaf_switch_come_together() -> None:
    leaves = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2]  # round robin: as bad as AMSP's figure 10b
    plain = list(range(12))
    assert groups_across_leaves(plain, leaves, 4) == 3
    order = node_order(leaves, 4)
    assert sorted(order) == plain
    assert groups_across_leaves(order, leaves, 4) == 0
    uneven = [0, 0, 0, 1, 1, 1, 1, 1]
    assert groups_across_leaves(node_order(uneven, 4), uneven, 4) == 1, (
        "3 and 5 nodes: one group has to cross"
    )
    with pytest.raises(UserError, match="no whole number of groups"):
        node_order(leaves, 5)


def test_node_0_stays_the_first_and_switches_of_one_size_are_a_scope() -> None:
    lonely = ["a", "b", "b", "c", "c", "c"]  # node 0 is left over, in the last group
    order = node_order(lonely, 2)
    assert order[0] == 0 and sorted(order) == list(range(6))
    assert groups_across_leaves(order, lonely, 2) == 1
    assert [nodes_per_switch(leaves) for leaves in ("aabb", "aaaa", "abab", "aab", "abc")] == [
        2,
        4,
        None,
        None,
        1,
    ]
    layout = parse_strategy("I/switch/cluster").on(Levels((8, 12), nodes_per_switch=4))
    assert (layout.p.pair, layout.g.pair, layout.os.pair) == ((8, 1), (8, 4), (8, 12))
    with pytest.raises(UserError, match=r"leaf.switch"):
        parse_strategy("I/switch/cluster").on(Levels((8, 12)))
    with pytest.raises(UserError, match="nodes do not fill switches"):
        Levels((8, 12), nodes_per_switch=5)
