"""Who imports whom, where import-linter does not look: scripts nothing from tests, and tests no other test."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def imported(folder: str) -> Iterator[tuple[Path, str]]:
    """Every module that a file of ``folder`` imports, by name alone (in a string) as well."""
    for file in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                yield from ((file, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from ((file, f"{node.module}.{alias.name}") for alias in node.names)
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
                yield file, ast.unparse(node.args[0]).strip("'")


def test_scripts_import_nothing_from_tests() -> None:
    assert [
        (file.name, name) for file, name in imported("scripts") if name.partition(".")[0] == "tests"
    ] == []


def test_no_test_imports_another_test() -> None:
    found = [(file, name) for file, name in imported("tests") if name.startswith("tests.")]
    assert len(found) > 100
    others = [
        (file.name, name) for file, name in found if any(part.startswith("test_") for part in name.split("."))
    ]
    assert others == []


def test_one_module_alone_seeds_pytorchs_generators() -> None:
    """``torch.manual_seed`` seeds CUDA's generators, which draw the dropout of an open run."""
    calls = [
        (str(file.relative_to(ROOT)), ast.unparse(node.func))
        for folder in ("cli", "common", "fcdp", "fuyou")
        for file in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
    ]
    seeding = {
        "torch.manual_seed",
        "torch.random.manual_seed",
        "torch.seed",
        "torch.random.fork_rng",
        "set_seed",
    }
    assert sorted((file, name) for file, name in calls if name in seeding or ".cuda.manual_seed" in name) == [
        ("common/randomness.py", "torch.manual_seed"),
        ("common/randomness.py", "torch.random.fork_rng"),
    ]
