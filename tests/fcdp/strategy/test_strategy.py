"""Strategies: what may be written, what each stands for on a cluster, and what is refused with which rule."""

import pytest

from common.errors import UserError
from fcdp.strategy.mesh import Levels, Mesh, Scope
from fcdp.strategy.strategy import PARO, PRESETS, parse_strategy

DGX = Levels((8, 128))
FRONTIER = Levels((2, 4, 16))


def pairs(text: str, levels: Levels) -> tuple[tuple[int, int], ...]:
    layout = parse_strategy(text).on(levels)
    return layout.p.pair, layout.g.pair, layout.os.pair


@pytest.mark.parametrize(("text", "levels", "rule"), [
    ("3x1", DGX, "equations 3 and 5"),
    ("16x1", DGX, "equations 3 and 5"),
    ("8x3", DGX, "equations 4 and 6"),
    ("8x256", DGX, "equations 4 and 6"),
    ("4x2", DGX, "equation 7"),
    ("3x1", Levels((2, 3, 4)), "equation 7, for the levels inside a node"),
    ("pair", DGX, "Write 2x1.*levels 2,4,128"),
])  # fmt: skip
def test_meshes_that_amsp_filters_out_are_rejected_with_its_equation(
    text: str, levels: Levels, rule: str
) -> None:
    with pytest.raises(UserError, match=rule):
        Scope.parse(text).on(levels)


@pytest.mark.parametrize(("name", "p", "g", "os"), [
    ("ddp", (1, 1), (1, 1), (1, 1)),
    ("zero1", (1, 1), (1, 1), (8, 128)),
    ("zero2", (1, 1), (8, 128), (8, 128)),
    ("zero3", (8, 128), (8, 128), (8, 128)),
    ("mics", (8, 1), (8, 1), (8, 1)),
    ("hsdp", (8, 1), (8, 1), (8, 1)),
    ("hybrid", (8, 1), (8, 1), (8, 1)),
    ("zero++", (8, 128), (8, 128), (8, 128)),
    ("fcdp", (8, 1), (8, 128), (8, 128)),
    ("fcdp-iig", (8, 1), (8, 1), (8, 128)),
    ("paro-gng", (8, 128), (1, 1), (8, 128)),
    ("amsp-30b", (8, 1), (8, 1), (8, 4)),
    ("I/G/G+host", (8, 1), (8, 128), (8, 128)),
    ("igg", (8, 1), (8, 128), (8, 128)),
    ("2x1/8x1/8x2", (2, 1), (8, 1), (8, 2)),
])  # fmt: skip
def test_names_on_amsps_testbed(
    name: str, p: tuple[int, int], g: tuple[int, int], os: tuple[int, int]
) -> None:
    assert pairs(name, DGX) == (p, g, os)


def test_zero_topo_uses_three_levels() -> None:
    assert pairs("zero-topo", FRONTIER) == pairs("pair/node/cluster", FRONTIER) == ((2, 1), (8, 1), (8, 16))
    layout = PRESETS["zero-topo"].on(FRONTIER)
    assert layout.secondary == Mesh((2, 1, 1)), "int8 shards besides the bf16 ones, over the same pair"
    assert PRESETS["zero-topo-exact"].on(FRONTIER).secondary is None, (
        "in bf16 they would be the same shards twice"
    )
    with pytest.raises(UserError, match="there is no pair"):
        PRESETS["zero-topo"].on(DGX)


@pytest.mark.parametrize(("text", "extents"), [
    ("zero-topo-8", (2, 4, 1)),  # tables V and VII: Sec-Degree=8
    ("zero-topo-8-exact", (2, 4, 1)),
    ("pair/node/cluster+second", (2, 4, 1)),
    ("pair/node/cluster+second=8", (2, 4, 1)),
    ("node/node/cluster+second=pair", (2, 1, 1)),
    ("G/G/G+host+second=4x1", (2, 2, 1)),
])  # fmt: skip
def test_the_degree_of_second_shards_is_written_like_a_scope(text: str, extents: tuple[int, ...]) -> None:
    assert parse_strategy(text).on(FRONTIER).secondary == Mesh(extents)


def test_paros_fourteen_are_those_of_its_table() -> None:
    table = ["NNN", "NNI", "NNG", "NII", "NIG", "NGG", "INI", "ING", "III", "IIG", "IGG", "GNG", "GIG", "GGG"]
    assert sorted(PARO) == sorted(table)
    assert all(PRESETS[f"paro-{scopes.lower()}"].scopes == scopes for scopes in table)
    left_out = {p + g + os for p in "NIG" for g in "NIG" for os in "NIG"} - set(table)
    assert len(left_out) == 13
    for scopes in left_out:
        with pytest.raises(UserError, match=r"PaRO 3\.1\.3, principle 1"):
            parse_strategy(scopes).on(DGX)


@pytest.mark.parametrize(("text", "message"), [
    ("8x1/4x1/8x1", "AMSP IV-B, equations 3 and 4"),
    ("pair/N/cluster", "PaRO's INI"),
    ("4x1/4x1/2x1", "principle 1"),
    ("N/N/G+host", "not sharded, so there is no cache"),
    ("G/G/G+host", "sharded over G as OS is"),
    ("N/N/G+second", "FCDP VI-A"),
    ("G/G/G+second=8x2", "stay inside a node"),
    ("G/G/G+second=none", "stay inside a node"),
    ("G/G/G+second=0", "is not a scope"),
    ("G/G/G+seconds=2", "Did you mean 'second'"),
    ("zero4", "Did you mean 'zero"),
    ("I/G/G+hots", "Did you mean 'host'"),
    ("X/G/G", "is not a scope"),
    ("fcdp+host", "Write scopes instead"),
    ("I/G", "no strategy"),
])  # fmt: skip
def test_rejections_cite_their_rule(text: str, message: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_strategy(text).on(FRONTIER)
    assert message in str(refused.value)


@pytest.mark.parametrize("text", ["8", "8,x", "", "2,,4"])
def test_levels_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match="levels"):
        Levels.parse(text)
