"""Files are written through the functions of common/files.py, which make them durable: other ways are listed here."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

ALLOWED = {  # call in a file: why it is durable, or need not be
    ("common/files.py", "replace"): "the functions themselves",
    ("common/files.py", "open"): "the functions themselves",
    ("common/files.py", "os.open"): "the functions themselves",
    ("common/files.py", "shutil.copytree"): "into a staging folder, which is synced as a whole",
    ("common/files.py", "shutil.copyfile"): "into a staging folder",
    ("common/store/posix.py", "open"): "a file that is synced after its last byte, in a staging folder",
    ("common/models/checkpoint/writer.py", "save_pretrained"): "into a staging folder",
    ("common/models/checkpoint/writer.py", "to_json_file"): "into a staging folder",
    ("common/models/checkpoint/writer.py", "replace"): "out of a staging folder after it was synced",
    ("common/models/generation.py", "to_json_file"): "into a staging folder",
    ("common/models/checkpoint/gguf.py", "save_pretrained"): "synced before their digests are written, which count",
    ("common/models/checkpoint/gguf.py", "to_json_file"): "also synced before",
    ("common/models/checkpoint/gguf.py", "open"): "an empty file that is locked",
    ("common/models/adapters/adapters.py", "save_pretrained"): "into a staging folder",
    ("common/data/demo_text.py", "save_pretrained"): "into the staging folder of the demonstration",
    ("cli/demo.py", "save_pretrained"): "into a staging folder",
    ("cli/demo.py", "replace"): "a download in the cache, compared with its hash before each use",
    ("cli/train/loop.py", "save_pretrained"): "the engine's, into a staging folder",
    ("fuyou/integrations/model.py", "save_pretrained"): "the engine's, which stages and syncs",
    ("cli/job/outputs.py", "replace"): "synced before, and the directories after it",
    ("cli/job/replaced.py", "replace"): "moves what is on the drive; the directories are synced after it",
    ("common/scratch.py", "open"): "an empty file that is locked",
    ("common/files.py", "durable=False"): "a cache, which is checked when it is read",
    ("cli/report/log.py", "open"): "metrics: lines that are appended and synced one by one",
    ("cli/train/process.py", "open"): "a message to torchrun, read by its process",
    ("cli/train/process.py", "os.open"): "/dev/null",
    ("cli/main.py", "os.open"): "/dev/null",
    ("common/store/directories.py", "opened"): "preallocates a file of a store, and syncs it",
    ("common/store/directories.py", "os.open"): "an empty file that is locked",
    ("fuyou/checkpoint/resume.py", "rename"): "a store's folder, whose parent is synced after it",
    ("fuyou/optimizer/kernels.py", "replace"): "a library in the cache",
    ("fcdp/checkpoint.py", "opened"): "a rank's part of a commit, synced before the manifest",
    ("fcdp/checkpoint.py", "rename"): "a commit's folder, whose parent is synced after it",
}  # fmt: skip
WRITERS = ("write_text", "write_bytes", "save_file", "save_pretrained", "to_json_file", "rename", "renames")
OPENERS, CREATING = ("os.open", "opened"), ("O_WRONLY", "O_RDWR", "O_CREAT")


def writing_calls(source: str) -> Iterator[str]:
    """Yield the name of each call that writes, moves, or copies a file."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        last = name.rpartition(".")[2]
        words = [ast.unparse(value) for value in (*node.args, *(keyword.value for keyword in node.keywords))]
        modes = [word.strip("'") for word in words if word.startswith("'")]
        if last == "replace_file" and "durable=False" in ast.unparse(node):
            yield "durable=False"
        elif last in WRITERS or (last == "replace" and (name == "os.replace" or len(words) == 1)):
            yield last
        elif name.startswith(("shutil.copy", "shutil.move")) or name == "torch.save":
            yield name
        elif name in OPENERS:
            if any(flag in word for word in words for flag in CREATING):
                yield name
        elif last == "open" and any(
            mode and set(mode) <= set("rwaxbt+") and set(mode) - set("rbt") for mode in modes
        ):
            yield last


@pytest.mark.parametrize("source", [
    "path.write_text(x)", "open(path, 'w')", "path.open('ab')", "open(path, mode='x')", "os.replace(a, b)",
    "a.replace(b)", "a.rename(b)", "torch.save(x, path)", "shutil.copyfile(a, b)", "os.open(a, os.O_CREAT)",
])  # fmt: skip
def test_each_way_to_write_is_seen(source: str) -> None:
    assert len(list(writing_calls(source))) == 1
    assert not list(writing_calls("path.read_text(); open(path); open(path, 'rb'); name.replace('a', 'b')"))


def test_files_are_written_by_the_functions_that_make_them_durable() -> None:
    files = [
        file
        for package in ("common", "fuyou", "fcdp", "cli")
        for file in sorted((ROOT / package).rglob("*.py"))
    ]
    found = {
        (file.relative_to(ROOT).as_posix(), call)
        for file in files
        for call in writing_calls(file.read_text())
    }
    assert found - ALLOWED.keys() == set(), (
        "use replace_file, file_when_complete, or Outputs of common and cli"
    )
