"""What the user names is looked for before PyTorch is loaded."""

import os
import subprocess
import sys

import pytest

from tests.helpers.doc_blocks import ROOT

CASES = {
    "plan --gpu 4090 --model llama-7c": "--model: 'llama-7c' is neither a checkpoint directory nor a preset.",
    "--model llama-10m --data chats.jsnl": "There is no data file 'chats.jsnl'.",
    "--model llama-10m --data a.jsonl=0.5 b.jsonl=0.5": "There is no data file 'a.jsonl'.",
    "--model llama-10m --data random --eval-data ./held-out.txt": "There is no data file './held-out.txt'.",
    "--model llama-10m --data docs/apj.md": "There is no data file 'docs/apj.md'. Did you mean 'api.md'?",
    "--model llama-10m --data docs/zzzzz.md": "There is no data file 'docs/zzzzz.md'.\n",
    "--model tests/clj --data random": "Did you mean 'cli' in tests? Fetch it with `hf download tests/clj`",
    "--model me/tiny --data random": "(nowhere/hub). Fetch it with `hf download me/tiny`, or add --download.",
    "--model llama-10m --data random --adapter dosc": "--adapter: there is no file or directory 'dosc'. Did you mean",
    "--model llama-10m --data random --peft-config dosc": "--peft-config: there is no file or directory 'dosc'.",
    "--model llama-10m --data random --ssd nowhere": "There is no directory nowhere. Make it (mkdir -p nowhere)",
    "--model llama-10m --data random --ssd README.md": "README.md is not a directory. Give --ssd a directory",
    "--model llama-10m --data random --ssd docs ./docs": "docs is given twice. Give each drive once.",
    "plan --config qwen3-8b-lora": "A plan needs no weights: --model qwen3-8b.",
    "evaluate --model llama-10m": "finetune evaluate --model DIR --data FILE.",
    "export --output nowhere": "nowhere: name its --output, or give --model and --adapter to merge.",
    "verify nowhere": "verify: there is no file or directory 'nowhere'.",
}


@pytest.mark.parametrize("line", CASES)
def test_a_missing_input_is_reported_before_pytorch_is_loaded(line: str) -> None:
    code = (
        "import sys; from cli.main import main; status = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules; sys.exit(status)"
    )
    environment = {**os.environ, "HF_HUB_CACHE": "nowhere/hub", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", code, *line.split()]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert ended.returncode == 2
    assert CASES[line] in ended.stderr
