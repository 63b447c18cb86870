"""The code blocks of a Markdown page, and a shell that is just large enough for them.

A block runs unless the line above it says ``<!-- not run here: REASON -->``; ``<!-- file: NAME -->`` makes it a file.
"""

import glob
import io
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from cli.main import main as finetune

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    number: int
    language: str
    text: str
    mark: str

    @property
    def reason(self) -> str | None:
        """Why it is not run; None if it is."""
        if self.mark == "install-and-test":
            return ".ci/run runs it"
        return self.mark.removeprefix("not run here: ") if self.mark.startswith("not run here: ") else None

    @property
    def file(self) -> str | None:
        """The file that it stands for."""
        return self.mark.removeprefix("file: ") if self.mark.startswith("file: ") else None

    @property
    def commands(self) -> list[str]:
        """What is typed: the lines of a shell block, or those after ``$`` in a block with output."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language != "sh":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]

    def __str__(self) -> str:
        return f"{self.page}-{self.number}"


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    return [
        Block(page.name, number, match["language"], match["text"], match["mark"] or "")
        for number, match in enumerate(_FENCE.finditer(page.read_text()))
    ]


def run_command(command: str, drives: Path) -> None:
    """Run one command line: ``finetune`` in this process, scripts of ours in another; patterns and ``>`` work.

    Args:
        command: the line.
        drives: folder that stands for ``/mnt``.
    """
    words = shlex.split(command.replace("/mnt/", f"{drives}/"), comments=True)
    target = None
    if ">" in words:
        place = words.index(">")
        words, target = words[:place], words[place + 1]
    words = [str(Path(word).expanduser()) if word.startswith("~") else word for word in words]
    words = [found for word in words for found in (sorted(glob.glob(word)) or [word])]
    name, arguments = words[0], words[1:]
    if name == "finetune":
        out = io.StringIO()
        with redirect_stdout(out):
            status = finetune(arguments)
        assert status == 0, command
        if target is not None:
            Path(target).write_text(out.getvalue())
    elif name == "python":
        script = ROOT / arguments[0]
        done = subprocess.run([sys.executable, script, *arguments[1:]], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    else:
        raise AssertionError(
            f"{command!r}: say above the block why {name} is not run: <!-- not run here: ... -->"
        )
