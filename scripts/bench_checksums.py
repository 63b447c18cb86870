"""What checksums cost per step: the same training with them and without, in turns.

A model whose states are all streamed, and whose batch is small, so that the SSDs are the bound. Without checksums every
sum is zero (and what is read is not looked at); all else is as it is.

    python scripts/bench_checksums.py --ssd /mnt/nvme0 --rounds 4
"""

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import click

ROOT = Path(__file__).parents[1]

#: Read by every Python that is started with its directory in PYTHONPATH: the optimizer process, too.
WITHOUT = "import common.store.checksums as module\nmodule.checksum = lambda data, first_page: 0\n"
RUN = """
import sys, time
import torch
from transformers import LlamaConfig
import fuyou
config = LlamaConfig(
    vocab_size=512, hidden_size=1024, intermediate_size=4096, num_hidden_layers={layers}, num_attention_heads=8,
    num_key_value_heads=8, max_position_embeddings=64,
)
batch = dict.fromkeys(("input_ids", "labels"), torch.arange(16).view(1, 16))
options = dict(host_memory="2GiB", host_cache=0, batch_shape=(1, 16), overwrite=True)
with fuyou.Engine(config, ssd=[{ssd!r}], **options) as engine:
    for step in range({steps} + 1):
        if step == 1:
            began, before = time.monotonic(), engine.io_bytes()
        engine(**batch).loss.backward()
        engine.step()
    engine.flush()
    seconds = (time.monotonic() - began) / {steps}
    moved = sum(engine.io_bytes()) - sum(before)
    print(engine.parameters, seconds, moved / {steps})
"""


@click.command()
@click.option("--ssd", type=click.Path(exists=True, file_okay=False), required=True, help="A directory on a drive.")
@click.option("--layers", default=8, show_default=True, help="Of 16.8 M parameters each.")
@click.option("--steps", default=6, show_default=True, help="In each run, after one that does not count.")
@click.option("--rounds", default=3, show_default=True, help="Runs of each kind.")
def main(ssd: str, layers: int, steps: int, rounds: int) -> None:
    """Print the median step time of both kinds, and every run."""
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    with tempfile.TemporaryDirectory() as patch, tempfile.TemporaryDirectory(dir=ssd) as drive:
        (Path(patch) / "sitecustomize.py").write_text(WITHOUT)
        program = RUN.format(layers=layers, steps=steps, ssd=drive)
        for number in range(rounds):
            for kind in ("with", "without") if number % 2 else ("without", "with"):
                paths = [str(ROOT)] if kind == "with" else [patch, str(ROOT)]
                environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
                done = subprocess.run(
                    [sys.executable, "-P", "-c", program], env=environment, capture_output=True, text=True, check=True
                )
                parameters, each, nbytes = map(float, done.stdout.split())
                seconds[kind].append(each)
                print(f"{kind:8} {each:.3f} s per step, {nbytes / each / 1e9:.2f} GB/s", flush=True)
    on, off = (statistics.median(seconds[kind]) for kind in ("with", "without"))
    print(f"{parameters / 1e6:.0f} M parameters: {on:.3f} s with, {off:.3f} s without: {on / off - 1:+.1%}")


if __name__ == "__main__":
    main()
