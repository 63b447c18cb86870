"""Prices of parts, and what the paper concludes from them (Fuyou, arXiv 2403.06504, table 5 and figure 10)."""

from pathlib import Path

import pytest

from cli.plan.prices import Prices
from common.errors import UserError
from common.hardware.presets import drive_preset, gpu_preset
from fuyou.planner import PaperScheme, describe_training, preset_machine

P5510, RTX_4090, A100 = drive_preset("p5510"), gpu_preset("4090"), gpu_preset("a100-80g")


def test_table_5_of_the_paper() -> None:
    prices = Prices.load(None)
    assert (prices.server, prices.gpus[RTX_4090.name], prices.gpus[A100.name]) == (14_098, 1_600, 14_177)
    server = prices.of_machine(RTX_4090.name, P5510.name, 12)
    assert server is not None and (server.parts, server.whole) == (1_600 + 12 * 308, 1_600 + 12 * 308 + 14_098)
    cluster = prices.of_machine(A100.name, P5510.name, 2, nodes=3, gpus_per_node=4)
    assert cluster is not None and cluster.whole == 3 * (4 * 14_177 + 2 * 308 + 14_098)
    assert prices.of_machine("h100", P5510.name, 1) is None


def test_figure_10_of_the_paper() -> None:
    """Section 5.7: for GPT-3 175B on a 4090, tokens per dollar of GPU and SSDs rise with the SSDs up to 6, and 12 are
    too many. (What all SSDs move together, and Adam, as in ``scripts/reproduce_fuyou.py``.)"""
    prices, job = Prices.load(None), describe_training("gpt3-175b", 16, 1024)
    value = {}
    for drives in (2, 6, 12):
        machine = preset_machine(
            RTX_4090, P5510, drives, 768 << 30, drives_limit=24.5e9, adam_parameters_per_second=3.9e9
        )
        price = prices.of_machine(RTX_4090.name, P5510.name, drives)
        assert price is not None
        result = PaperScheme(job, machine).plan()
        assert result.fits, result.missing
        value[drives] = result.tokens_per_second / price.parts
    assert value[2] < value[6] > value[12], value


def test_prices_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('title = "today"\nserver = 1\n[gpus]\nh100 = 2\n[drives]\nx = 3\n')
    price = Prices.load(str(file)).of_machine("h100", "x", 2)
    assert price is not None and (price.parts, price.whole) == (8, 9)
    file.write_text("server = 1\n")
    with pytest.raises(UserError, match="is no file of prices"):
        Prices.load(str(file))
    with pytest.raises(UserError, match=r"No such file.*Did you mean 'fuyou-table-5'"):
        Prices.load("fuyou-table-6")
