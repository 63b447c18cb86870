"""``finetune --nodes --ssd``: out of core on several nodes, each with its own SSDs."""

import re
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cli.main import main
from tests.helpers.command.histories import history
from tests.helpers.processes.pairs import COMMON, Pair, same


@pytest.mark.slow
def test_a_killed_rank_and_an_exported_model(
    pair: Pair, checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    command = ("--model", checkpoint, "--data", data, *COMMON, "--steps", 30, "--host-memory", "4GiB")
    output, alone = tmp_path / "out", tmp_path / "alone"
    drives = [tmp_path / name for name in ("ssd0", "ssd1")]
    for drive, name in zip(drives, ("first", "second"), strict=True):
        drive.mkdir()
        pair.start(*command, "--output", output, "--ssd", drive, names=(name,))
    pair.wait_for(r"^step 5/")
    ranks = {number: process for node in pair.nodes for number, process in node.ranks().items()}
    ranks[1].send_signal(signal.SIGKILL)
    pair.wait_for(r"^resume   after step \d+ of 30 \(restarted: a rank was lost\)")
    assert pair.statuses(240) == [0, 0]
    assert main([str(word) for word in (*command, "--output", alone, "--micro-batch", 2)]) == 0
    said = "".join(node.said for node in pair.nodes)
    assert "Traceback" not in said and re.search(r"network  [\d.]+ KiB sent by each node per step", said)
    same(history(output), history(alone))
    # Two ranks equal two micro-batches, bit for bit, in spite of all that has happened on the way.
    assert [line["loss"] for line in history(output)] == [line["loss"] for line in history(alone)]
    ours, theirs = (AutoModelForCausalLM.from_pretrained(path) for path in (output, alone))
    for (name, one), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(("words", "message"), [
    (["--strategy", "zero3"], "--strategy is for training in memory, without --ssd"),
    (["--gpu", "4090"], "every rank has its own GPU"),
])  # fmt: skip
def test_options_that_do_not_go_together(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["--model", "llama-10m", "--data", "random", "--nodes", "1", "--ssd", str(tmp_path), *words])
        == 2
    )
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
