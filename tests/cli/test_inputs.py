"""What the user names is looked for before PyTorch is loaded."""

import subprocess
import sys

import pytest

CASES = {
    "plan --gpu 4090 --model llama-7c": "--model: 'llama-7c' is neither a checkpoint directory nor a preset.",
    "--model llama-10m --data chats.jsnl": "There is no data file 'chats.jsnl'.",
    "--model llama-10m --data a.jsonl=0.5 b.jsonl=0.5": "There is no data file 'a.jsonl'.",
    "--model llama-10m --data random --eval-data ./held-out.txt": "There is no data file './held-out.txt'.",
}


@pytest.mark.parametrize("line", CASES)
def test_a_missing_input_is_reported_before_pytorch_is_loaded(line: str) -> None:
    code = (
        "import sys; from cli.main import main; status = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules; sys.exit(status)"
    )
    ended = subprocess.run([sys.executable, "-c", code, *line.split()], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert CASES[line] in ended.stderr
