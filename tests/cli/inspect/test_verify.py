"""``finetune --verify``: a run as it was written, and one with a flipped bit."""

import contextlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.inspect.check import run_verify
from cli.job.outputs import RESULT, Outputs
from cli.job.replaced import set_aside
from cli.options.loss_sum import edited_lines
from cli.options.run_record import RUN, RunRecord, described_stores, note_end
from cli.report.page import read_metrics
from common.errors import FinetuneError, UserError
from common.store import Layout, commit_manifest, load_manifest
from common.store.directories import DirectoryLock, create_directories
from common.store.folders import successor_folder
from fuyou.checkpoint.run_files import VerifiedRun, without_common_step
from tests.cli.conftest import Finetune

SMALL = ("--batch-size", 1, "--seq-len", 16, "--gpu", "cpu", "--steps", 2, "--no-save")


def test_a_whole_run_and_a_damaged_one(finetune: Finetune, checkpoint: Path, tmp_path: Path) -> None:
    drives = [tmp_path / "nvme0", tmp_path / "nvme1"]
    for drive in drives:
        drive.mkdir()
    trained = finetune("--model", checkpoint, *SMALL, "--ssd", *drives, "--output", tmp_path / "out")
    assert trained.status == 0, trained.err
    whole = finetune("--verify", *drives)
    assert (whole.status, whole.err) == (0, "")
    assert "step 2," in whole.out and whole.out.endswith(": all as written\n")
    assert whole.out.count("verify   ") == 1, "one run on two drives"

    for place, message in {
        drives[
            1
        ]: f"The run in {drives[1]}/fuyou-.* is striped over 2 directories, and number 1 is not among those",
        tmp_path: f"There is no run in {tmp_path}. Name what --ssd or --output named",
    }.items():
        wrong = finetune("--verify", place)
        assert wrong.status == 2 and re.search(message, wrong.err), wrong.err
    # As they lie where several ranks share drives
    copies = [tmp_path / "copy" / drive.name for drive in drives]
    for drive, copy in zip(drives, copies, strict=True):
        (folder,) = drive.iterdir()
        shutil.copytree(folder, copy / folder.name / "rank-1")
    of_ranks = finetune("--verify", *copies)
    assert of_ranks.status == 0 and f"{copies[1]}/{folder.name}/rank-1: step 2," in of_ranks.out
    places = [copy / folder.name / "rank-1" for copy in copies]
    for rank, status in ((0, 1), (1, 0), (3, 0), (2, 1)):
        ranks = {"run": "x", "nodes": 2, "ranks_per_node": 2, "rank": rank, "previous": None}
        commit_manifest(places[0], {**(load_manifest(places[0]) or {}), "cluster": ranks})
        exchanged = finetune("--verify", *copies)
        assert exchanged.status == status, exchanged.err
        assert exchanged.err.count(f"holds the part of rank {rank}, which is kept in rank-0") == 2 * status
    (folder,) = drives[0].iterdir()
    moving = shutil.copytree(folder, successor_folder(folder))
    wrong = finetune("--verify", *drives)
    assert (
        wrong.status == 2
        and f"The run in {folder} was moving to other drives when it was killed" in wrong.err
    )
    shutil.rmtree(moving)

    for file in drives[1].glob("*/weights.*"):
        # One byte per page in both slots, whichever is the committed one
        content = bytearray(file.read_bytes())
        for position in range(0, len(content), 4096):
            content[position] ^= 1
        file.write_bytes(content)
    damaged = finetune("--verify", *drives)
    assert damaged.status == 1 and f"{drives[1]}/" in damaged.err and f"{drives[0]}/" not in damaged.err
    assert damaged.out.endswith(" damaged\n")
    assert all(line.startswith("finetune: error: ") for line in damaged.err.splitlines())


def test_files_of_the_result_are_compared_with_their_list(
    finetune: Finetune, checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    """Also those that changed at rest, which has no time. The store lies elsewhere."""
    output, drive = tmp_path / "out", tmp_path / "drive"
    drive.mkdir()
    line = (
        "--model", checkpoint, "--data", data, "--batch-size", 1, "--seq-len", 16, "--gpu", "cpu", "--steps", 2,
        "--save-every", 1, "--output", output, "--ssd", drive, "--resume", "auto",
    )  # fmt: skip
    assert finetune(*line).status == 0
    whole = finetune("verify", output)
    assert whole.status == 0 and whole.out.count("all as written") == 2, whole.err
    assert str(drive) in whole.out and "files of its run" in whole.out
    relative = finetune("verify", "out", "drive")
    assert relative.status == 0 and relative.out.count("all as written") == 2, relative.err
    weights, config = output / "model.safetensors", output / "checkpoints/step-1/config.json"
    before, times = weights.read_bytes(), (weights.stat().st_atime_ns, weights.stat().st_mtime_ns)
    weights.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    os.utime(weights, ns=times)
    config.unlink()
    damaged = finetune("verify", output)
    assert damaged.status == 1 and "2 damaged" in damaged.out, damaged.err
    assert (
        f"{weights} is not what the run wrote there" in damaged.err and f"{config} is missing" in damaged.err
    )
    assert f"finetune export --output {output}" in damaged.err

    again = finetune(*line)  # writes the result again: it is not "finished"
    assert again.status == 0 and "finished" not in again.out, again.err
    assert weights.read_bytes() == before
    assert finetune(*line).out.startswith("finished after step 2")
    weights.write_bytes(before[:-1])
    shutil.rmtree(drive)
    drive.mkdir()
    refused = finetune(*line)
    assert refused.status == 2 and f"{weights} is not what the run wrote there" in refused.err, refused.err
    without = finetune("verify", output)
    assert without.status == 1 and "which a finished run can do without" in without.out, without.err
    (output / "run/files.json").write_text("")
    unlisted = finetune("verify", output)
    assert unlisted.status == 1 and "files.json is missing or damaged" in unlisted.err, unlisted.err


def test_a_copy_of_an_output_is_verified_with_its_own_store(
    finetune: Finetune, checkpoint: Path, tmp_path: Path
) -> None:
    trained = finetune("--model", checkpoint, *SMALL, "--output", tmp_path / "out")
    assert trained.status == 0, trained.err
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    with DirectoryLock([tmp_path / "out/store"]):  # the original continues
        copied = finetune("verify", tmp_path / "copy")
    assert copied.status == 0 and f"{tmp_path}/copy/store: step 2" in copied.out, copied.err
    assert f"{tmp_path}/out" not in copied.out and copied.out.count("all as written") == 2


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """The output of a finished run, whose commits, of ranks in memory, were deleted after its end."""
    output = tmp_path / "out"
    (output / "commits").mkdir(parents=True)
    outputs = Outputs(output, "x")
    for name in ("checkpoints/step-2", RESULT):
        (outputs.prepare(name) / "config.json").write_text("{}")
        outputs.put(name)
    content = {"id": "x", **described_stores([output / "commits"])}
    (output / RUN / "run.json").write_text(json.dumps(content))
    (output / RUN / "config.toml").write_text("[output]\nno-save = false\n")
    note_end(output, 3)
    (output / "commits").rmdir()
    return output


def edited(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(run: Path) -> None:
        content = json.loads((run / name).read_text())
        change(content)
        (run / name).write_text(json.dumps(content))

    return edit


@pytest.mark.parametrize(("damage", "message"), [
    (lambda run: (run / "run.json").write_text("{"), "run.json cannot be read"),
    (lambda run: (run / "run.json").write_text(""), "run.json cannot be read"),
    (lambda run: (run / "run.json").unlink(), "run.json is missing"),
    (edited("run.json", lambda content: content.pop("id")), "run.json has no id"),
    (edited("run.json", lambda content: content.pop("stores")), "run.json does not name the directories"),
    (edited("run.json", lambda content: content["stores"].clear()), "run.json does not name the directories"),
    (edited("run.json", lambda content: content["stores"][0].pop("path")), "run.json does not name the directories"),
    (lambda run: (run / "files.json").write_text(""), "files.json is missing or damaged"),
    (lambda run: (run / "files.json").write_text("{}"), "files.json is missing or damaged"),
    (edited("files.json", lambda content: content.pop("id")), "files.json is missing or damaged"),
    (edited("files.json", lambda content: content["files"].update(a=5)), "files.json is missing or damaged"),
    (edited("files.json", lambda content: content["files"].clear()), "files.json lists no result"),
    (edited("files.json", lambda content: content["files"].clear()), "files.json was edited"),
    (edited("files.json", lambda content: content.update(command=["rm"])), "files.json was edited"),
    (edited("files.json", lambda content: content["files"].pop("checkpoints/step-2/config.json")),
     "step-2/config.json is not in run/files.json"),
    (lambda run: (run.parent / "adapter_config.json").touch(), "adapter_config.json is not in run/files.json"),
])  # fmt: skip
def test_what_describes_a_run_is_verified_too(
    finished: Path, damage: Callable[[Path], Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_verify([str(finished)]) == 0, capsys.readouterr().err
    damage(finished / RUN)
    assert run_verify([str(finished)]) == 1
    assert message in capsys.readouterr().err


def test_a_part_of_an_output_is_verified_with_all_of_it(finished: Path) -> None:
    for part in ("checkpoints/step-2", "checkpoints", "run"):
        with pytest.raises(UserError, match=rf"is a part of .* finetune verify {finished} verifies all"):
            run_verify([str(finished / part)])


def test_what_a_killed_command_leaves_is_not_all_as_written(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither a result that was set aside to be replaced, nor an export that wrote nothing yet."""
    set_aside(finished, [f"{RUN}/run.json", f"{RUN}/files.json"], "new", [])
    Outputs(finished, "new").write()
    with pytest.raises(UserError, match=rf"set aside is in {finished}/\.replaced"):
        run_verify([str(finished)])
    Outputs(tmp_path / "merged", "x").write()
    assert run_verify([str(tmp_path / "merged")]) == 1
    assert "has neither a run nor a result" in capsys.readouterr().err


def test_the_last_step_and_the_store_belong_to_the_run(
    finetune: Finetune, checkpoint: Path, tmp_path: Path
) -> None:
    """The last commit lacks the loss of the last step; a store is replaced by a copy of it, or by another run's."""
    line = ("--model", checkpoint, *SMALL, "--output")
    assert (
        finetune(*line, tmp_path / "out").status
        == finetune(*line, tmp_path / "other", "--seed", 1).status
        == 0
    )
    assert finetune("verify", tmp_path / "out").status == 0
    for name, (first, *rest) in {
        name: (tmp_path / "out" / name).read_text().splitlines(keepends=True)
        for name in ("losses.jsonl", "run/metrics.jsonl")
    }.items():
        file = tmp_path / "out" / name
        file.write_text(first)
        lost = finetune("verify", tmp_path / "out")
        assert lost.status == 0 and f"gap      {file} has no line for step 2" in lost.out, lost.out
        file.write_text(first + "".join(rest).replace('"lr": ', '"lr": 1'))
        other = finetune("verify", tmp_path / "out")
        assert other.status == 1 and f"{file} has other losses than this run" in other.err, other.err
        file.write_text("".join([first, *rest]))
        file.write_text("".join([first, *rest, *rest]).replace('"step": 2', '"step": 3', 1))
        later = finetune("verify", tmp_path / "out")
        assert later.status == 1 and f"{file} has a line for step 3, and the run in" in later.err, later.err
        file.write_text("".join([first, *rest]))
    description = json.loads((tmp_path / "out/run/run.json").read_text())
    (tmp_path / "out/run/run.json").write_text(json.dumps({**description, "ended_after": 1}))
    older = finetune("verify", tmp_path / "out")
    assert older.status == 1 and "was done after step 1, and its store is at step 2" in older.err, older.err
    (tmp_path / "out/run/run.json").write_text(json.dumps(description))
    shutil.rmtree(tmp_path / "out/store")
    shutil.copytree(tmp_path / "other/store", tmp_path / "out/store")
    another = finetune("verify", tmp_path / "out")
    assert another.status == 1 and f"The store in {tmp_path / 'out'} is that of another run" in another.err


@pytest.mark.parametrize(("lost", "message"), [
    (("store.json",), "store.json is missing, which says which run's store is in"),
    (("manifest.json",), "or that file was lost since (copy it back)"),
    ((), "belongs to another store: copy back what was there"),
])  # fmt: skip
def test_a_store_that_lost_a_file_is_named(
    finetune: Finetune, checkpoint: Path, tmp_path: Path, lost: tuple[str, ...], message: str
) -> None:
    """Or has all but its identity from another run."""
    output, other = tmp_path / "out", tmp_path / "other"
    line = ("--model", checkpoint, *SMALL, "--output")
    assert finetune(*line, output).status == 0 and (lost or finetune(*line, other, "--seed", 1).status == 0)
    for name in lost:
        (output / "store" / name).unlink()
    for name in () if lost else ("manifest.json", "weights.0", "weights.1"):
        shutil.copy(other / "store" / name, output / "store")
    verified = finetune("verify", output)
    assert verified.status and message in verified.err, verified.err
    resumed = finetune(*line, output, "--resume", "--steps", 3)
    assert resumed.status and (message in resumed.err or lost == ("manifest.json",)), resumed.err
    assert "begin a new run" not in resumed.err


@pytest.mark.parametrize("inside", [True, False])
def test_directories_of_a_finished_run_are_exchanged(
    finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    """Of two ranks, in the output or on drives, or of one store; or their description is edited."""
    monkeypatch.setattr(
        "cli.inspect.check.verify_run", lambda paths: VerifiedRun(tuple(paths), 3, 1, 4096, [])
    )
    root = finished / "store" if inside else finished.with_name("drives")
    shutil.rmtree(root, ignore_errors=True)
    places = [root / f"rank-{rank}" for rank in range(3)]
    for folder in places:
        folder.mkdir(parents=True)
    create_directories(places[:2], Layout(2), overwrite=False)
    create_directories(places[2:], Layout(1), overwrite=False)
    for folder in places:
        commit_manifest(folder, {"step": 3, "user": {}})
    description = json.loads((finished / RUN / "run.json").read_text())
    stores = described_stores([root])["stores"]

    def verified(stores: list[dict[str, Any]]) -> str:
        (finished / RUN / "run.json").write_text(json.dumps({**description, "stores": stores}))
        status = run_verify([str(finished), *([] if inside else [str(root)])])
        text = capsys.readouterr().err
        assert bool(status) == bool(text)
        return text

    assert len(stores) == 3 and not verified(stores)
    for first, second in itertools.combinations(places, 2):
        for is_back in (False, True):
            first.rename(root / "other")
            second.rename(first)
            (root / "other").rename(second)
            text = verified(stores)
            assert "mount its drive" not in text
            if not is_back:
                assert f"{first} holds what the run had in {second}: folders were exchanged" in text
        assert not text
    edited = [{**stores[0], "index": 1 - stores[0]["index"]}, *stores[1:]]
    assert "and run.json does not name it" in verified(edited)


def test_one_rank_of_a_finished_run_is_gone(
    finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a store may be deleted then, but not a part of it."""
    description = json.loads((finished / RUN / "run.json").read_text())
    drive = finished.with_name("drive")
    drive.mkdir()
    create_directories([drive], Layout(1), overwrite=False)
    commit_manifest(drive, {"step": 3, "user": {}})
    (there,) = described_stores([drive])["stores"]
    gone = {**there, "path": str(drive.with_name("gone")), "store": "x"}
    (finished / RUN / "run.json").write_text(json.dumps({**description, "stores": [there, gone]}))
    monkeypatch.setattr("cli.inspect.check.verify_run", lambda paths: VerifiedRun(paths, 3, 1, 4096, []))
    assert run_verify([str(finished)]) == 1
    assert f"is not in {gone['path']}: mount its drive" in capsys.readouterr().err
    shutil.rmtree(drive)
    assert run_verify([str(finished)]) == 0


@pytest.mark.parametrize("name", ["run.json", "files.json", "metrics.jsonl", "config.toml"])
def test_pipes_are_not_read(finished: Path, name: str) -> None:
    file = finished / RUN / name
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    with contextlib.suppress(FinetuneError):
        run_verify([str(finished)])
    assert RunRecord.read(finished) is None or name != "run.json"
    assert list(edited_lines(file)) == read_metrics(file) == []


def test_commands_in_messages_are_quoted(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = finished.rename(finished.with_name("my run"))
    (output / "config.json").write_text("[]")
    assert run_verify([str(output)]) == 1
    assert f"finetune export --output '{output}'." in capsys.readouterr().err


def test_a_damaged_journal_puts_nothing_back(finetune: Finetune, finished: Path) -> None:
    """Nor does a command continue next to what it set aside."""
    set_aside(finished, [f"{RUN}/run.json", f"{RUN}/files.json"], "new", [])
    merged = finetune("evaluate", "--model", finished, "--data", "d.jsonl")
    lost = finetune("evaluate", "--model", finished / "checkpoints/step-9", "--data", "d.jsonl")
    assert all("The next finetune train or export" in each.err for each in (merged, lost)), lost.err
    (finished / ".replaced/journal.json").write_text("{")
    for words in (("verify", finished), ("--output", finished, "--resume"), ("chat", "--model", finished)):
        refused = finetune(*words)
        assert (
            refused.status == 2 and "journal.json is damaged, which lists what a killed run" in refused.err
        ), words


def test_files_that_are_lost_with_their_lines_in_the_list_are_named(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("checkpoints/step-2/config.json", "config.json"):
        edited("files.json", lambda content, name=name: content["files"].pop(name))(finished / RUN)
        (finished / name).unlink()
        assert Outputs.read(finished).is_edited and run_verify([str(finished)]) == 1
        assert "files.json was edited since it was written" in capsys.readouterr().err
    Outputs.read(finished).write()
    assert not Outputs.read(finished).is_edited


def test_what_a_run_has_yet_to_write_needs_no_export(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where another file is damaged: the run was killed before its first result."""
    outputs = Outputs.read(finished)
    outputs.remove("checkpoints/step-2")
    (outputs.prepare("base") / "config.json").write_text("{}")
    outputs.put("base")
    for command in ("", "finetune export"):
        (finished / "base/config.json").write_text("[]")
        if not command:
            edited("files.json", lambda content: content["files"].pop("config.json"))(finished / RUN)
            edited("run.json", lambda content: content.pop("ended_after"))(finished / RUN)
            (finished / "config.json").unlink()
        else:
            note_end(finished, 3)
        assert run_verify([str(finished)]) == 1
        text = capsys.readouterr().err
        assert "base/config.json is not what the run wrote" in text
        assert ("finetune export" in text) == bool(command)


@pytest.mark.parametrize("steps", [*itertools.product((3, 4, 5), repeat=3)], ids=str)
def test_ranks_without_a_common_step_are_named(steps: tuple[int, ...]) -> None:
    """Each has the step before its last one, too."""
    ranks = [
        VerifiedRun((Path(f"rank-{rank}"),), step, 1, 1, [], "run", frozenset({step, step - 1}))
        for rank, step in enumerate(steps)
    ]
    others = [
        VerifiedRun((Path("alone"),), 9, 1, 1, []),
        VerifiedRun((Path("x"),), 1, 1, 1, [], "x", frozenset({1})),
    ]
    faults = list(without_common_step([*ranks, *others]))
    assert bool(faults) == (max(steps) - min(steps) > 1)
    for where, sentence in faults:
        assert where == "rank-0, rank-1, rank-2"
        assert all(f"rank-{rank} holds step {step}" in sentence for rank, step in enumerate(steps))
