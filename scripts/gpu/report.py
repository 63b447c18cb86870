"""results.json as Markdown: of each section its tables, its figures, and why something is missing."""

from typing import Any


def render(results: dict[str, Any]) -> str:
    """Return the whole report."""
    lines = ["# GPU check", ""]
    if results.get("command"):
        lines += [f"`{results['command']}`, {results.get('date', '')}.", ""]
    for name, section in results["sections"].items():
        seconds = f", {section['seconds']:.0f} s" if "seconds" in section else ""
        why = f": {section['why']}" if section.get("why") else ""
        lines += [f"## {name}", "", f"{section.get('status', 'running')}{seconds}{why}", ""]
        for key, value in (section.get("data") or {}).items():
            lines += _drawn(key, value)
    return "\n".join(lines).rstrip() + "\n"


def _drawn(name: str, value: Any) -> list[str]:
    if isinstance(value, str) and "\n" in value:
        return ["```", value.rstrip(), "```", ""]
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        columns = list(dict.fromkeys(key for row in value for key in row))
        rows = [
            columns,
            ["---"] * len(columns),
            *([_cell(row.get(key, "-")) for key in columns] for row in value),
        ]
        return [f"{name}:", "", *("| " + " | ".join(row) + " |" for row in rows), ""]
    return [f"* {name}: {_cell(value)}"]


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(item)}" for key, item in value.items()) or "-"
    if isinstance(value, list):
        return " ".join(map(_cell, value)) or "-"
    text = (
        f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)
    )
    return text.replace("|", "/").replace("\n", " ")
