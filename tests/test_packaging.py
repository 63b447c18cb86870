"""What a user gets by installing: the right ``common``, presets in the package, and a README that is the truth."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from common.units import parse_bytes

ROOT = Path(__file__).parents[1]
PACKAGES = ("cli", "fcdp", "fuyou", "common", "configs")


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins(file: str = "constraints.txt") -> dict[str, str]:
    lines = [line for line in (ROOT / file).read_text().splitlines() if line and not line.startswith("#")]
    return {name.lower().replace("_", "-"): version for name, version in (line.split("==") for line in lines)}


def test_the_lowest_versions_are_those_that_are_allowed() -> None:
    bounds = [re.match(r"([\w-]+)>=([\d.]+)", line) for line in project()["project"]["dependencies"]]
    allowed = {bound[1]: re.sub(r"(\.0)+$", "", bound[2]) for bound in bounds if bound is not None}
    lowest = {
        name: re.sub(r"(\.0)+$", "", version) for name, version in pins("constraints-lowest.txt").items()
    }
    assert lowest == allowed


@pytest.mark.parametrize("package", ["fuyou", "fcdp"])
@pytest.mark.parametrize("kind", ["package", "module", "folder"])
def test_rejects_somebody_elses_common(tmp_path: Path, package: str, kind: str) -> None:
    foreign = (
        tmp_path / {"package": "common/__init__.py", "module": "common.py", "folder": "common/tools.py"}[kind]
    )
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("answer = 42\n")
    # A folder without __init__.py gives way to a package anywhere on the path; only an import hook, as editable
    # installs use, comes after it. So ours is left off the path in that case, and found by a hook of the same kind.
    hook = (
        "import sys, importlib.machinery as m\n"
        f"class Hook:\n    find_spec = staticmethod(lambda name, *_: m.PathFinder.find_spec(name, [{str(ROOT)!r}]))\n"
        "sys.meta_path.append(Hook)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{hook}import {package}"], env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    found = foreign.parent if kind == "folder" else foreign
    assert last.startswith(f"ImportError: {package} needs the package 'common'"), done.stderr
    assert str(found) in last


@pytest.mark.parametrize("package", ["fuyou", "fcdp"])
def test_accepts_its_own_common_from_any_directory(tmp_path: Path, package: str) -> None:
    subprocess.run(
        [sys.executable, "-c", f"import {package}"], env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path,
        check=True, timeout=400,
    )  # fmt: skip


def test_every_source_folder_is_a_package_that_gets_installed() -> None:
    patterns = project()["tool"]["setuptools"]["packages"]["find"]["include"]
    assert patterns == [f"{name}*" for name in ("common", "fuyou", "fcdp", "cli", "configs")]
    for package in PACKAGES:
        for source in (ROOT / package).rglob("*.py"):
            assert (source.parent / "__init__.py").exists(), (
                f"{source.parent} has no __init__.py: left out of the wheel"
            )


def test_presets_are_package_data_and_well_formed() -> None:
    presets = sorted((ROOT / "configs").rglob("*.toml"))
    assert presets
    assert project()["tool"]["setuptools"]["package-data"]["configs"] == ["**/*.toml", "**/*.jinja"]
    for preset in presets:
        assert tomllib.loads(preset.read_text()), preset


@pytest.mark.parametrize("path", sorted((ROOT / "configs/gpus").glob("*.toml")), ids=lambda path: path.stem)
def test_gpu_presets_are_complete_and_give_their_sources(path: Path) -> None:
    preset = tomllib.loads(path.read_text())
    required = {"name", "memory", "link_gb_per_s", "bf16_tflops", "memory_gb_per_s"}
    # Rates of the parts, or the preset of whose peak they are the same parts
    rates = {"like"} if "like" in preset else {"dense_tflops", "experts_tflops", "attention"}
    assert required | rates <= preset.keys() <= required | rates | {"upload_gb_per_s", "download_gb_per_s"}
    if "like" not in preset:
        assert "flash2" in preset["attention"]
        assert all(
            each.keys() == {"forward_tflops", "backward_tflops"} for each in preset["attention"].values()
        )
    assert 8 * 2**30 <= parse_bytes(preset["memory"]) <= 512 * 2**30
    assert preset.get("dense_tflops", 0) <= preset["bf16_tflops"], "no kernel beats the peak"
    assert_every_number_has_a_source(path)


@pytest.mark.parametrize("path", sorted((ROOT / "configs/drives").glob("*.toml")), ids=lambda path: path.stem)
def test_drive_presets_are_complete_and_give_their_sources(path: Path) -> None:
    preset = tomllib.loads(path.read_text())
    required = {"name", "capacity", "read_gb_per_s", "write_gb_per_s"}
    assert required <= preset.keys() <= required | {"cache", "sustained_write_gb_per_s", "endurance_tb"}
    assert_every_number_has_a_source(path)


def assert_every_number_has_a_source(path: Path) -> None:
    groups = path.read_text().strip().split("\n\n")
    assert all(group.startswith("# ") for group in groups), "every number has a source above it"


def test_constraints_pin_what_the_project_names() -> None:
    described = project()["project"]
    named = [*described["dependencies"], *described["optional-dependencies"]["dev"]]
    names = {re.split(r"[<>=]", requirement)[0].lower() for requirement in named}
    assert names <= pins().keys()
    assert pins()["torch"] == "2.13.0"
    assert not [version for version in pins().values() if "+" in version], "local builds fit one machine only"


def test_ci_runs_the_readmes_own_command() -> None:
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci/run").read_text()
    marked = re.findall(r"<!-- install-and-test -->\n```sh\n(.+)\n```", readme)
    assert len(marked) == 1, "one command, on one line, after the mark"
    assert re.fullmatch(r"python3 -m venv .+ -c constraints\.txt -e '\.\[dev\]' && .+pytest.*", marked[0])
    extract = re.search(r"^install_and_test=\$\((.+)\)$", ci, re.MULTILINE)
    assert extract
    got = subprocess.run(["bash", "-c", extract[1]], cwd=ROOT, capture_output=True, text=True, check=True)
    assert got.stdout.strip() == marked[0]
    assert os.access(ROOT / ".ci/run", os.X_OK)
