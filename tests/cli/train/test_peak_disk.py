"""The most bytes that a run has on its drives, sampled from its beginning to its end."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from transformers import LlamaConfig

from common.files import CACHE_VARIABLE
from tests.cli.conftest import Finetune
from tests.helpers.models.gguf_files import FIELDS, write_gguf
from tests.helpers.models.small_checkpoints import SIZES

pytest.importorskip("gguf")
WIDE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 4}
WIDE_FIELDS = {
    "block_count": 4,
    "embedding_length": 512,
    "feed_forward_length": 2048,
    "attention.head_count": 4,
}


def allocated(folder: Path) -> int:
    """Return the bytes allocated for the files in a folder, of which some may go meanwhile."""
    total = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(directory, name)).st_blocks * 512
    return total


@contextmanager
def sampled(folder: Path) -> Iterator[list[int]]:
    """Yield a list with the most bytes that the files in a folder have had until then."""
    peak, ended = [0], threading.Event()

    def sample() -> None:
        while not ended.wait(0.005):
            peak[0] = max(peak[0], allocated(folder))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_run_on_a_gguf_file_has_one_copy_of_its_bytes(
    finetune: Finetune, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Store, output, and cache together; adapters take 4 bytes per parameter for values and 8 for moments, twice in
    the store as steps are committed, and 4 in each of two files of the result."""
    run = tmp_path / "run"
    run.mkdir()
    monkeypatch.setenv(CACHE_VARIABLE, str(run / "cache"))
    config = LlamaConfig(**SIZES | WIDE)
    file = write_gguf(tmp_path / "model.gguf", config, FIELDS | WIDE_FIELDS, kinds=("Q4_K", "Q6_K"))
    words = (
        "--gpu",
        "cpu",
        "--dtype",
        "bf16",
        "--lora-rank",
        4,
        "--steps",
        2,
        "--batch-size",
        2,
        "--seq-len",
        16,
    )
    with sampled(run) as peak:
        done = finetune("--model", file, "--data", data, *words, "--output", run / "out")
    assert done.status == 0, done.err
    adapters = 4 * 4 * (4 * 1024 + 3 * 2560)  # rank, layers, and the widths that each adapted matrix has
    expected = file.stat().st_size + 32 * adapters
    assert file.stat().st_size > 8 << 20
    assert file.stat().st_size < peak[0] < expected + (2 << 20), (peak, expected)
