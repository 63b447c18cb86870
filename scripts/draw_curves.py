"""Draw losses of runs, from their ``run/metrics.jsonl``, into one SVG: training drawn through, evaluations as dots.

python scripts/draw_curves.py docs/pictures/smollm2.svg LoRA=out/run/metrics.jsonl 'LoRA, nf4=nf4/run/metrics.jsonl'
"""

import html
import json
import sys
from pathlib import Path

WIDTH, HEIGHT, LEFT, BOTTOM = 560, 260, 44, 30
METRICS = ("loss_metrics/global_avg_loss", "validation_metrics/loss")
COLORS = ("#3567a8", "#b3541e", "#2f7d4f", "#7a4fa3")


def main() -> None:
    out, *runs = sys.argv[1:]
    curves = {}
    for run in runs:
        name, _, file = run.partition("=")
        entries = [json.loads(line) for line in Path(file).read_text().splitlines()]
        curves[name] = [[(e["step"], e[metric]) for e in entries if metric in e] for metric in METRICS]
    points = [point for pair in curves.values() for line in pair for point in line]
    last, top = max(step for step, _ in points), max(loss for _, loss in points)
    x = lambda step: LEFT + step / last * (WIDTH - LEFT - 10)  # noqa: E731
    y = lambda loss: HEIGHT - BOTTOM - loss / top * (HEIGHT - BOTTOM - 10)  # noqa: E731
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="#fff"/>'
    ]
    for loss in range(int(top) + 1):
        parts.append(f'<path d="M{LEFT} {y(loss):.1f}H{WIDTH - 10}" stroke="#d5dbe1"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss}</text>')
    for step in sorted({0, last // 2, last}):
        parts.append(
            f'<text x="{min(x(step), WIDTH - 30):.1f}" y="{HEIGHT - 10}" text-anchor="middle">step {step}</text>'
        )
    for number, (name, (trained, held_out)) in enumerate(curves.items()):
        color, line = COLORS[number], " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in trained)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x(step):.1f}" cy="{y(loss):.1f}" r="4" fill="{color}"/>' for step, loss in held_out]
        label = html.escape(f"{name}: {trained[0][1]:.3f} to {trained[-1][1]:.3f}")
        parts.append(f'<text x="{WIDTH - 14}" y="{24 + 16 * number}" text-anchor="end" fill="{color}">{label}</text>')
    Path(out).write_text("\n".join([*parts, "</svg>\n"]))


if __name__ == "__main__":
    main()
