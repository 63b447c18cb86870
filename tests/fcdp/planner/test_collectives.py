"""What a step sends, against hand-computed volumes and against rings walked rank by rank."""

from dataclasses import replace

import pytest
from published.engines import select_and_drop

from common.errors import UserError
from fcdp.planner import Workload, bytes_per_node, step_collectives
from fcdp.strategy.mesh import Levels
from fcdp.strategy.strategy import PRESETS, Strategy, parse_strategy

PSI = 1e9
MODEL_BYTES = 2 * PSI


def volumes(
    strategy: Strategy, levels: Levels, *, micro_batches: int = 1, trainable: float = 1.0
) -> tuple[float, float]:
    """Bytes across nodes and inside per node, over model bytes."""
    layout = strategy.on(levels)
    workload = Workload(PSI, trainable * PSI, blocks=10, micro_batches=micro_batches)
    inter, intra = bytes_per_node(step_collectives(layout, workload), layout)
    return inter / MODEL_BYTES, intra / MODEL_BYTES


@pytest.mark.parametrize(("scopes", "inter_node"), [
    # Two nodes of two ranks, four micro-batches, level by level: a gather or a reduce-scatter over all ranks crosses
    # nodes with (n-1)/n = 1/2 of the model, an all-reduce with twice that.
    ("GGG", 4 * (0.5 + 0.5 + 0.5)),
    ("GIG", 4 * (0.5 + 0.5) + 0.5),
    ("GNG", 4 * (0.5 + 0.5) + 0.5),
    ("IGG", 4 * 0.5 + 0.5),
    ("IIG", 0.5 + 0.5),
    ("ING", 0.5 + 0.5),
    ("NGG", 4 * 0.5 + 0.5),
    ("NIG", 0.5 + 0.5),
    ("NNG", 0.5 + 0.5),
    ("III", 1.0),
    ("INI", 1.0),
    ("NII", 1.0),
    ("NNI", 1.0),
    ("NNN", 1.0),
])  # fmt: skip
def test_across_nodes_for_all_of_paros_strategies(scopes: str, inter_node: float) -> None:
    assert volumes(PRESETS[f"paro-{scopes.lower()}"], Levels((2, 2)), micro_batches=4)[0] == pytest.approx(
        inter_node
    )


def test_flat_rings_cross_the_border_of_a_node_with_w_minus_1_of_w() -> None:
    assert volumes(PRESETS["zero3"], Levels((2, 2)))[0] == pytest.approx(3 * 0.75)
    assert volumes(PRESETS["ddp"], Levels((8, 4)))[0] == pytest.approx(2 * 31 / 32)


def test_frozen_parameters_stay_where_the_node_has_them() -> None:
    levels, ratio = Levels((8, 2)), 0.01
    assert volumes(PRESETS["fcdp"], levels, trainable=ratio)[0] == pytest.approx(0.5 * 2 * ratio)
    assert volumes(PRESETS["zero3"], levels, trainable=ratio)[0] == pytest.approx(15 / 16 * (2 + ratio))


def test_quantized_collectives_move_half_and_a_quarter_plus_scales() -> None:
    levels = Levels((2, 4, 2))
    exact, quantized = (
        step_collectives(PRESETS[name].on(levels), Workload(PSI, PSI, blocks=1))
        for name in ("zero-topo-exact", "zero-topo")
    )
    half, quarter = 0.5 * (1 + 4 / 256), 0.25 * (1 + 8 / 256)
    ratios = [few.nbytes / many.nbytes for few, many in zip(quantized, exact, strict=True)]
    assert ratios == pytest.approx([half, half, quarter, 1.0, 1.0])


def test_amsps_formulas() -> None:
    """IV-C, p = 2x1, g = os = 8x1 on 8 x 16 ranks, M = 3: 2M gathers and M reduce-scatters of 2 Phi over 2, M-1
    all-reduces of 2 Phi / 2 over 4, one all-reduce over all 64 that share a shard, broadcasts over 4."""
    strategy = replace(parse_strategy("2x1/8x1/8x1"), ring="flat")
    layout = strategy.on(Levels((8, 16)))
    found = select_and_drop(layout, Workload(PSI, PSI, blocks=1, micro_batches=3))
    assert [(one.operation, one.mesh.pair, one.nbytes, one.times) for one in found] == [
        ("all_gather", (2, 1), 2 * PSI, 3), ("all_gather", (2, 1), 2 * PSI, 3), ("reduce_scatter", (2, 1), 2 * PSI, 3),
        ("all_reduce", (4, 1), PSI, 2), ("all_reduce", (4, 16), PSI, 1), ("broadcast", (4, 1), PSI, 1),
    ]  # fmt: skip
    odd = parse_strategy("2x1/4x1/8x1").on(Levels((8, 16)))
    with pytest.raises(UserError, match="IV-C3"):
        select_and_drop(odd, Workload(PSI, PSI, blocks=1))
