"""The sweep over families tells exact from wrong, from what is refused, and from what crashes or hangs."""

import json
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.helpers.processes import forked

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


def test_a_few_families(tmp_path: Path) -> None:
    found, page = tmp_path / "found.json", tmp_path / "families.md"
    words = [sys.executable, SCRIPTS / "sweep_families.py", "--names", "gpt2,zamba2,musicgen"]
    ended = forked.run([*words, "--json", found, "--write", page], timeout=120)
    assert ended.returncode == 0, ended.stderr
    verdicts = {one["name"]: one for one in json.loads(found.read_text())}
    assert {name: one["verdict"] for name, one in verdicts.items()} == {
        "gpt2": "exact", "zamba2": verdicts["zamba2"]["verdict"], "musicgen": "untrainable",
    }  # fmt: skip
    assert verdicts["gpt2"]["loss_difference"] == verdicts["gpt2"]["weight_difference"] == 0.0
    assert len(set(verdicts["gpt2"]["losses"][0])) == 3  # it learns
    assert all(
        heading in page.read_text()
        for heading in ("## Exact", "\ngpt2", "## Untrainable", "* **musicgen**: ")
    )


@pytest.mark.slow
def test_plans_at_the_shapes_that_models_have(tmp_path: Path) -> None:
    found, page = tmp_path / "found.json", tmp_path / "families.md"
    page.write_text("# Families\n", encoding="utf-8")
    words = [
        sys.executable,
        SCRIPTS / "sweep_families.py",
        "--shapes",
        "--names",
        "gpt2,cpmant,Qwen/Qwen3-0.6B",
    ]
    ended = forked.run([*words, "--seconds", "200", "--json", found, "--write", page], timeout=300)
    assert ended.returncode == 0, ended.stderr
    plans = {(one["name"], one["way"]): one for one in json.loads(found.read_text())}
    assert {name for (name, _), one in plans.items() if not one["reason"]} == {"gpt2", "Qwen/Qwen3-0.6B"}
    assert plans["gpt2", "full"]["parameters"] == 124_439_808
    assert page.read_text().startswith("# Families\n")
    for line in (
        "| Qwen/Qwen3-0.6B | 596 M | planned | planned |",
        "LoRA: 1 planned, 1 refused.",
        "* **cpmant**, full: ",
    ):
        assert line in page.read_text()


@pytest.mark.usefixtures("_importable")
def test_published_models_are_shapes_that_transformers_reads() -> None:
    from families.shapes import published, shape_config

    models = published()
    assert len(models) == 37
    for name in ("google/gemma-4-26B-A4B", "zai-org/GLM-5.2"):
        assert shape_config(name).model_type == models[name]["model_type"]


@pytest.mark.usefixtures("_importable")
def test_parts_are_all() -> None:
    import sweep_families

    every = sweep_families.names_of(None, None)
    assert sorted(
        name for part in (1, 2, 3) for name in sweep_families.names_of(None, f"{part}/3")
    ) == sorted(every)
    assert sweep_families.names_of(None, "today/3") in [
        sweep_families.names_of(None, f"{part}/3") for part in (1, 2, 3)
    ]


@pytest.mark.usefixtures("_importable")
@pytest.mark.parametrize("what", ["loss", "weight"])
def test_wrong_results_are_called_wrong(what: str, tmp_path: Path) -> None:
    from families.trial import Finding, Mode, _Expected, _Trial

    weights = {"a": torch.ones(4), "b": torch.ones(4)}
    # B has hardly learnt: that it did must not get lost
    before = {"a": torch.ones(4), "b": torch.ones(4) - 1e-6}
    expected = _Expected([2.0, 1.5], before, weights)
    trained = {"a": torch.ones(4), "b": before["b"] if what == "weight" else torch.ones(4)}
    finding = Finding("x", "crash")
    _Trial("x", Mode(), tmp_path, finding)._judge(expected, [2.0, 1.5 + 1e-4 * (what == "loss")], trained)
    assert finding.verdict == "wrong"
    assert finding.reason.startswith("loss of step 2" if what == "loss" else "weights differ by 1.0e-06")
    finding = Finding("x", "crash")
    trial = _Trial("x", Mode(), tmp_path, finding)
    trial._judge(expected, [2.0, 1.5], weights)
    trial._judge_evaluations([("it is whole", 2.0, 2.0 + 1e-6)])
    assert finding.verdict == "exact"
    trial._judge_evaluations([("it is whole", 2.0, 2.0), ("it is exported", 2.0, 2.1)])
    assert (finding.verdict, finding.reason) == (
        "wrong",
        "evaluates to 2.000000, and to 2.100000 where it is exported",
    )


@pytest.mark.usefixtures("_importable")
def test_children_that_hang_or_die_do_not_end_the_sweep() -> None:
    from families.children import run_forked

    def work(task: str) -> dict[str, str]:
        if task == "hangs":
            time.sleep(60)
        if task == "dies":
            sys.exit(3)
        return {"said": task}

    found = {
        task: (result, why)
        for task, result, why in run_forked(["a", "hangs", "dies"], work, jobs=2, seconds=3)
    }
    assert found == {
        "a": ({"said": "a"}, ""),
        "hangs": (None, "hang"),
        "dies": (None, "its process ended with 1"),
    }
