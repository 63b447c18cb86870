"""What is reported of TRL's own tests on the engine."""

import json
from pathlib import Path

from click.testing import CliRunner

from scripts.trl_suite import main


def findings(path: Path, became: dict[str, tuple[str, str]]) -> None:
    lines = [
        {"test": f"tests/test_{name}", "became": kind, "reason": reason} for name, (kind, reason) in became.items()
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_only_what_passes_in_memory_counts(tmp_path: Path) -> None:
    (tmp_path / "made.json").write_text("{}")
    passed = ("passed", "")
    memory = {"dpo_trainer.py::a": passed, "dpo_trainer.py::b": passed, "kto_trainer.py::c": ("skipped", "no network")}
    findings(tmp_path / "memory.jsonl", memory)
    engine = {**memory, "dpo_trainer.py::b": ("refused", "Leave it out."), "kto_trainer.py::c": ("failed", "Error")}
    findings(tmp_path / "engine.jsonl", engine)
    done = CliRunner().invoke(main, [str(tmp_path), str(tmp_path), "--only", "report"])
    assert done.exit_code == 0
    assert done.output.splitlines() == [
        "sft: 0 pass in memory; on the engine none", "dpo: 2 pass in memory; on the engine 1 passed, 1 refused",
        "kto: 0 pass in memory; on the engine none", "reward: 0 pass in memory; on the engine none",
        "1 refused: Leave it out.", "in memory: 2 passed, 1 skipped",
    ]  # fmt: skip
    findings(tmp_path / "engine.jsonl", {"dpo_trainer.py::a": ("failed", "TypeError")})
    done = CliRunner().invoke(main, [str(tmp_path), str(tmp_path), "--only", "report"])
    assert done.exit_code == 1 and "on the engine 1 failed, 1 not run" in done.output
