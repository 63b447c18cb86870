"""What belongs to a run in its output directory, and what a new run does with it."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.job.claim import claim, recover
from cli.job.inputs import check_apart
from cli.job.outputs import BASE, RESULT, Outputs, content_digest
from cli.options.run_record import REPLACED
from cli.options.settings import Settings
from common.errors import UserError
from tests.cli.conftest import Finetune
from tests.helpers.command.messages import check

STEP_2 = "checkpoints/step-2"
EARLIER_VERSION = '{"store": "store"}'  # The description of a run whose version listed nothing
ANY = {"resumes": False, "overwrites": True, "saves": True, "saves_checkpoints": True}


def write(outputs: Outputs, name: str, **files: str) -> None:
    """Write files as a run does; ``__`` in a name stands for a dot."""
    folder = outputs.prepare(name)
    for file, text in files.items():
        (folder / file.replace("__", ".")).write_text(text)
    outputs.put(name)


def settings_of(output: Path, **options: Any) -> Settings:
    return Settings(model="llama-10m", output=output, **{"overwrite": not options.get("resume"), **options})


def tree(directory: Path) -> dict[str, bytes | None]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() if path.is_file() else None
        for path in sorted(directory.rglob("*"))
    }


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """The output of a LoRA run, with a store."""
    directory = tmp_path / "out"
    (directory / "store").mkdir(parents=True)
    (directory / "store/manifest.json").write_text("committed")
    with claim(settings_of(directory)) as outputs:
        outputs.begin()
        (directory / "run/run.json").write_text(json.dumps({"id": outputs.id}))
        (directory / "losses.jsonl").write_text("{}")
        write(outputs, STEP_2, adapter_config__json="2", weights="2")
        write(outputs, BASE, config__json="base")
        write(
            outputs,
            RESULT,
            adapter_config__json="4",
            adapter_model__safetensors="4",
            chat_template__jinja="4",
        )
    return directory


def fail(earlier: Path, error: BaseException, work: Callable[[Outputs], object], launch: str = "") -> None:
    """Begin a run that does some ``work`` and fails then."""
    with claim(settings_of(earlier), launch) as outputs:
        work(outputs)
        raise error


def test_a_failure_before_the_first_commit_costs_nothing(earlier: Path) -> None:
    def begin(outputs: Outputs) -> None:
        assert sorted(path.name for path in earlier.iterdir()) == [REPLACED, "run", "store"]
        write(outputs, BASE, config__json="new")

    before = tree(earlier)
    for error in (UserError("bad data"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            fail(earlier, error, begin)
        assert tree(earlier) == before


def test_once_the_store_has_changed_the_earlier_run_does_not_come_back(earlier: Path) -> None:
    with pytest.raises(UserError) as caught:
        fail(earlier, UserError("a full drive"), lambda _: (earlier / "store/manifest.json").unlink())
    assert str(earlier / REPLACED) in caught.value.__notes__[0]
    recover(earlier)
    assert not (earlier / "adapter_config.json").exists()
    assert not (earlier / "run/run.json").exists()
    with claim(settings_of(earlier)) as outputs:  # the next attempt
        outputs.check(**ANY)
        outputs.begin()
    assert sorted(path.name for path in earlier.iterdir()) == ["run", "store"]


def killing(function: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list whose number counts down with each call of a function of os, which ends the process at 0."""
    real, calls = getattr(os, function), [0]

    def counted(*args: Any, **named: Any) -> Any:
        calls[0] -= 1
        if calls[0] == 0:
            raise SystemExit
        return real(*args, **named)

    monkeypatch.setattr(os, function, counted)
    return calls


@pytest.mark.parametrize("function", ["replace", "mkdir", "fsync", "rmdir"])
def test_a_run_killed_at_any_moment_before_its_first_commit_is_undone(
    function: str, earlier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so is the undoing: it can be killed, too."""
    before = tree(earlier)
    monkeypatch.setattr("cli.job.claim._undo", lambda *_: None)  # no handler runs in a process that is killed
    calls = killing(function, monkeypatch)
    for number in range(1, 100):
        calls[0] = number
        with contextlib.suppress(SystemExit), claim(settings_of(earlier)):
            raise SystemExit
        was_reached = calls[0] <= 0
        calls[0] = number
        with contextlib.suppress(SystemExit):
            recover(earlier)
        calls[0] = -1
        recover(earlier)
        assert tree(earlier) == before, number
        if not was_reached:
            return
    raise AssertionError("more calls than expected")


@pytest.mark.parametrize(
    "name", ["config.json", "chat_template.jinja", f"{STEP_2}/weights", "checkpoints/best/notes"]
)
def test_what_is_not_listed_or_changed_is_in_the_way_and_stays(name: str, earlier: Path) -> None:
    Outputs.read(earlier).check(**ANY)
    with pytest.raises(UserError, match=r"holds adapters already.*--overwrite.*--resume"):
        Outputs.read(earlier).check(**ANY | {"overwrites": False})
    (earlier / name).parent.mkdir(exist_ok=True)
    (earlier / name).write_text("mine, and longer")
    with pytest.raises(UserError, match="which no run has written there, or which changed since"):
        Outputs.read(earlier).check(**ANY)
    with contextlib.suppress(UserError), claim(settings_of(earlier)) as outputs:
        # Which looks at the result only
        outputs.begin()
    assert (earlier / name).read_text() == "mine, and longer"


def test_only_listed_checkpoints_are_rotated_and_taken_for_whole(earlier: Path) -> None:
    outputs = Outputs.read(earlier)
    (earlier / "checkpoints/step-1").mkdir()
    (earlier / "checkpoints/step-1/notes.txt").touch()
    assert outputs.is_whole(STEP_2) and not outputs.is_whole("checkpoints/step-1")
    assert outputs.checkpoints(9) == [STEP_2]
    with pytest.raises(UserError, match=r"notes\.txt was not written by this run"):
        write(outputs, "checkpoints/step-1", weights="1")
    (earlier / STEP_2 / "notes.txt").touch()
    outputs.remove(STEP_2)
    assert [path.name for path in (earlier / STEP_2).iterdir()] == ["notes.txt"]
    assert (earlier / "checkpoints/step-1/notes.txt").exists() and outputs.checkpoints(9) == []
    (earlier / BASE / "config.json").unlink()
    assert not Outputs.read(earlier).is_whole(BASE)


@pytest.mark.parametrize("is_listed_as_before", [False, True])
def test_a_link_is_what_it_was_while_its_target_is(
    is_listed_as_before: bool, earlier: Path, tmp_path: Path
) -> None:
    """The weights of a classifier's ``base/``; earlier versions had no hash of them."""
    target, other = tmp_path / "weights.safetensors", tmp_path / "another.safetensor"
    target.write_text("weights")
    other.write_text("others")
    outputs = Outputs.read(earlier)
    (outputs.prepare(BASE) / "weights-1.safetensors").symlink_to(target)
    outputs.put(BASE)
    link, files = earlier / BASE / "weights-1.safetensors", earlier / "run/files.json"
    if is_listed_as_before:
        content = json.loads(files.read_text())
        content["files"]["base/weights-1.safetensors"][2] = "not a regular file"
        files.write_text(json.dumps(content))
    outputs = Outputs.read(earlier)
    assert outputs.is_whole(BASE) and list(outputs.links(BASE)) == [target]
    if not is_listed_as_before:
        target.write_text("others!")
        assert outputs.faults(BASE) == [f"{link} is not what the run wrote there."]
        assert outputs.links(BASE)[target] != content_digest(target)
    target.unlink()
    assert outputs.faults(BASE) == [f"{link} is a link to {target}, where nothing is."]
    outputs.check(**ANY)  # it is the run's all the same
    if not is_listed_as_before:
        link.unlink()
        link.symlink_to(other)
        assert outputs.faults(BASE) == [f"{link} is not what the run wrote there."]
        link.unlink()
        link.symlink_to(target)
    write(outputs, BASE, config__json="another")
    assert outputs.is_whole(BASE)


def test_no_result_is_written_next_to_what_would_be_loaded_with_it(earlier: Path) -> None:
    outputs = Outputs.read(earlier)
    (earlier / "pytorch_model.bin").touch()  # during the run
    with pytest.raises(UserError, match=r"pytorch_model\.bin was not written by this run"):
        write(outputs, RESULT, config__json="5", model__safetensors="5")
    assert outputs.is_whole(RESULT)


def test_a_result_replaces_all_of_the_one_before(earlier: Path) -> None:
    outputs = Outputs.read(earlier)
    write(outputs, RESULT, adapter_config__json="5", adapter_model__safetensors="5")
    assert sorted(path.name for path in earlier.iterdir() if path.is_file()) == [
        "adapter_config.json", "adapter_model.safetensors", "losses.jsonl",
    ]  # fmt: skip
    assert Outputs.read(earlier).is_whole(RESULT)


@pytest.mark.parametrize("function", ["replace", "mkdir", "fsync", "rmdir", "unlink"])
@pytest.mark.parametrize("name", [RESULT, STEP_2])
def test_what_is_killed_while_it_is_written_is_not_whole_and_is_written_again(
    name: str, function: str, earlier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, number, was_reached = killing(function, monkeypatch), 0, True
    while was_reached:
        number += 1
        text = f"new {number}"
        calls[0] = number
        with contextlib.suppress(SystemExit):
            write(Outputs.read(earlier), name, adapter_config__json=text, weights__safetensors=text)
        was_reached, calls[0] = calls[0] <= 0, -1
        outputs = Outputs.read(earlier)
        files = [earlier / name / file for file in ("adapter_config.json", "weights.safetensors")]
        if outputs.is_whole(name) and files[1].exists():
            assert files[0].read_text() == files[1].read_text()
        outputs.check(resumes=True, overwrites=False, saves=True, saves_checkpoints=True)
        write(outputs, name, adapter_config__json="again", weights__safetensors="again")
        assert outputs.is_whole(name) and files[1].read_text() == "again"
    assert number > 1 or function in ("unlink", "rmdir", "mkdir")


def test_what_an_earlier_version_wrote_is_known_by_its_names(earlier: Path) -> None:
    (earlier / "run/files.json").unlink()
    (earlier / "run/run.json").write_text(EARLIER_VERSION)
    (earlier / STEP_2 / "weights").rename(earlier / STEP_2 / "adapter_model.safetensors")
    (earlier / "notes.txt").touch()
    with pytest.raises(UserError, match="holds adapters already"):
        Outputs.read(earlier).check(**ANY | {"overwrites": False})
    with claim(settings_of(earlier)) as outputs:
        outputs.begin()
    assert sorted(path.name for path in earlier.iterdir()) == ["notes.txt", "run", "store"]


def test_a_restarted_rank_continues_with_what_the_lost_one_began(earlier: Path) -> None:
    lost = []

    def begin(outputs: Outputs) -> None:
        outputs.begin()
        write(outputs, BASE, config__json="new")
        lost.append(outputs)

    with pytest.raises(SystemExit):
        fail(earlier, SystemExit(), begin, "launch")
    with claim(settings_of(earlier), "launch") as outputs:
        assert outputs.id == lost[0].id
        assert outputs.is_whole(BASE)
    with claim(settings_of(earlier), "another launch") as outputs:
        assert outputs.id != lost[0].id
        assert not outputs.is_whole(BASE)


def test_nothing_that_is_read_is_written_into(tmp_path: Path) -> None:
    output = tmp_path / "out"
    (output / STEP_2).mkdir(parents=True)
    (output / "losses.jsonl").touch()
    (output / "texts.jsonl").touch()
    (tmp_path / "link").symlink_to(output / STEP_2)
    for options, message in (
        ({"model": str(output)}, "is --model"),
        ({"model": str(output / STEP_2)}, "lies in --output"),
        ({"model": str(tmp_path / "link")}, "lies in --output"),
        ({"model": str(tmp_path)}, "lies in --model"),
        ({"adapter": output / STEP_2}, "lies in --output"),
        ({"data": (str(output / "losses.jsonl"),)}, "lies in --output"),
        ({"data": (f"{tmp_path}=0.5",)}, "lies in --data"),
        ({"eval_data": (f"{tmp_path}:test",), "data": (str(output / "texts.jsonl"),)}, "lies in --eval-data"),
    ):
        settings = Settings(**{"model": "llama-10m", "output": output, **options})
        with pytest.raises(UserError, match=message):
            check_apart(settings, output)
    check_apart(Settings(model="llama-10m", data=(str(output / "texts.jsonl"),), output=output), output)


def test_a_command_that_is_refused_costs_nothing(
    finetune: Finetune, checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    small = ("--steps", 2, "--batch-size", 4, "--seq-len", 32, "--gpu", "cpu", "--save-every", 1)
    command = ("--model", checkpoint, *small, "--output", tmp_path / "out")
    assert finetune(*command, "--data", data).status == 0
    before = tree(tmp_path / "out")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "good"}\nnot json\n')
    check(finetune(*command, "--data", bad, "--overwrite"), 2, "bad.jsonl")
    check(finetune(*command, "--data", data, "--overwrite", "--device-memory", "1KiB"), 2, "--device-memory")
    step = tmp_path / "out/checkpoints/step-1"
    again = ("--data", data, *small, "--output", tmp_path / "out", "--overwrite")
    check(finetune("--model", step, *again, "--keep", 1), 2, f"--model {step} lies in --output")
    check(finetune("export", "--model", checkpoint, "--adapter", step, "--output", step), 2, "is --adapter")
    drive = ("--model", checkpoint, *again, "--ssd", step)
    check(
        finetune(*drive),
        2,
        f"--ssd {step} lies in --output {tmp_path / 'out'}, where the run writes and removes",
    )
    drive = ("--model", checkpoint, *small, "--output", tmp_path / "other", "--ssd", checkpoint)
    check(
        finetune(*drive, "--data", data),
        2,
        f"--ssd {checkpoint} is --model {checkpoint}, which is to be read",
    )
    inner = ("--model", checkpoint, "--data", data, *small, "--output", tmp_path / "out/checkpoints/mine")
    check(
        finetune(*inner),
        2,
        f"lies in {tmp_path / 'out/checkpoints'}, where the run of {tmp_path / 'out'} writes",
    )
    check(finetune("export", "--output", tmp_path / "out", "--overwrite"), 2, "leave --overwrite out")
    check(finetune("export", "--output", step), 2, f"in the output of one. Give --output {tmp_path / 'out'}.")
    moved = ("--output", tmp_path / "out", "--resume", "--model", tmp_path / "gone")
    check(finetune(*moved), 2, "neither a checkpoint directory", "give --model DIR, where they are now.")
    assert tree(tmp_path / "out") == before


def test_of_a_run_without_a_list_only_known_names_are_replaced(earlier: Path) -> None:
    """An earlier version listed nothing: other files may be the user's."""
    mine = (
        "my.safetensors", "tokenizer.mine", "README.md", "base/notes.txt", "checkpoints/mine/notes.txt",
        "checkpoints/best/notes.txt", "checkpoints/step-2/notes.txt", "checkpoints/step-2-mine/config.json",
    )  # fmt: skip
    (earlier / "run/files.json").unlink()
    (earlier / "run/run.json").write_text(EARLIER_VERSION)
    assert Outputs.read(earlier).is_whole(RESULT) and Outputs.read(earlier).is_whole(STEP_2)
    for name in mine:
        file = earlier / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("mine")
        with contextlib.suppress(UserError):
            Outputs.read(earlier).check(**ANY)
            with claim(settings_of(earlier)) as outputs:
                outputs.begin()
        assert file.read_text() == "mine"


@pytest.mark.parametrize(
    "files", [{"config.json": 5}, {"config.json": [5]}, {"config.json": ["a", 1, ""]}, [1], None]
)
@pytest.mark.parametrize("description", [None, "damaged"])
def test_without_its_list_a_run_owns_no_file(files: Any, description: str | None, earlier: Path) -> None:
    """The list is damaged, or, for None, gone; then what is the user's is not known."""
    (earlier / "run/files.json").write_text(json.dumps({"id": "a", "launch": "", "files": files}))
    if files is None:
        (earlier / "run/files.json").unlink()
    if description is not None:
        (earlier / "run/run.json").write_text(description)
    before = tree(earlier)
    with pytest.raises(UserError, match=r"holds adapter_config\.json.*move that elsewhere") as caught:
        Outputs.read(earlier).check(**ANY)
    assert files == [1] or isinstance(files, dict) or "run/files.json, the list" in str(caught.value)
    with pytest.raises(UserError), claim(settings_of(earlier)):
        pass
    assert tree(earlier) == before


@pytest.mark.parametrize("name", ["run", "checkpoints", "base", REPLACED])
def test_a_file_in_the_place_of_a_folder_is_rejected_at_the_start(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(UserError, match=f"{name} is a file, and the run needs a folder of that name"):
        Outputs.read(tmp_path).check(**ANY)


def test_a_link_to_nothing_is_no_free_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"holds config.json, which no run has written there"):
        Outputs.read(tmp_path).check(**ANY)


def test_files_that_changed_are_named_when_they_are_replaced_or_kept(
    earlier: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with claim(settings_of(earlier, resume=True)) as outputs:
        for file in ("adapter_config.json", "checkpoints/step-2/weights"):
            (earlier / file).write_text("edited by the user")
        write(
            outputs,
            RESULT,
            adapter_config__json="5",
            adapter_model__safetensors="5",
            chat_template__jinja="5",
        )
        assert "replaced adapter_config.json: changed since" in capsys.readouterr().out
        outputs.remove(STEP_2)
        assert "kept     checkpoints/step-2/weights: changed since" in capsys.readouterr().out
        assert (earlier / "checkpoints/step-2/weights").read_text() == "edited by the user"


@pytest.mark.parametrize("nbytes", [5, 10_000_001])
def test_a_copy_without_times_is_continued_by_content(nbytes: int, earlier: Path, tmp_path: Path) -> None:
    write(Outputs.read(earlier), STEP_2, adapter_config__json="2", weights="2" * nbytes)
    copy = Path(shutil.copytree(earlier, tmp_path / "copy", copy_function=shutil.copyfile))
    for path in copy.rglob("*"):
        os.utime(path, (1, 1))
    outputs = Outputs.read(copy)
    outputs.check(**ANY)
    assert outputs.is_whole(STEP_2) and outputs.is_whole(RESULT)
    (copy / STEP_2 / "weights").write_text("3" * nbytes)  # of the same size
    assert not outputs.is_whole(STEP_2)
    with pytest.raises(UserError, match="weights, which no run has written there, or which changed since"):
        outputs.check(**ANY)


def test_only_incomplete_folders_of_a_run_are_removed(earlier: Path) -> None:
    names = [
        "base",
        "base.old",
        "checkpoints/best",
        "checkpoints/best.old",
        STEP_2,
        f"{STEP_2}.old",
        ".export",
    ]
    mine = {"checkpoints/step-", "checkpoints/step-x", "checkpoints/base", "mine", "best", "step-3"}
    mine |= {f"{name}-mine" for name in names}
    for name in [*names, *mine]:
        (earlier / f"{name}.partial").mkdir()
    with claim(settings_of(earlier, resume=True)):
        pass
    left = {
        path.relative_to(earlier).as_posix().removesuffix(".partial") for path in earlier.rglob("*.partial")
    }
    assert left == mine


def test_what_was_not_set_aside_by_a_run_is_not_removed(earlier: Path) -> None:
    mine = earlier / REPLACED / "mine/notes.txt"
    mine.parent.mkdir(parents=True)
    mine.touch()
    before = tree(earlier)
    recover(earlier)  # as each command does
    assert tree(earlier) == before
    with pytest.raises(KeyboardInterrupt):
        fail(earlier, KeyboardInterrupt(), lambda _: None)
    assert tree(earlier) == before
    (earlier / REPLACED / "losses.jsonl").touch()
    with pytest.raises(UserError, match=r"losses\.jsonl was not set aside by a run: move it out of"):
        fail(earlier, KeyboardInterrupt(), lambda _: None)
    (earlier / REPLACED / "losses.jsonl").unlink()
    assert tree(earlier) == before
    with claim(settings_of(earlier)) as outputs:
        outputs.begin()
    assert [path.name for path in (earlier / REPLACED).rglob("*")] == ["mine", "notes.txt"]


@pytest.mark.parametrize("folder", [REPLACED, "run", "checkpoints", "base", "store"])
def test_no_run_begins_where_another_removes_files(folder: str, earlier: Path) -> None:
    for output in (earlier / folder, earlier / folder / "inner"):
        with pytest.raises(UserError, match=f"lies in {earlier / folder}, where the run of {earlier} writes"):
            Outputs(output, "").check(**ANY)
        Outputs(output, "").check(**ANY | {"resumes": True, "saves": False})
    Outputs(earlier / "inner" / folder, "").check(**ANY)


@pytest.mark.parametrize("function", ["replace", "unlink"])
def test_a_kill_while_a_result_replaces_another_leaves_one_of_them(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a store, nothing but the journal tells whether the earlier result is to be put back."""

    def replace_result(directory: Path, text: str) -> None:
        with claim(settings_of(directory)) as outputs:
            write(outputs, RESULT, **{f"model-{part}-of-2__safetensors": text for part in (1, 2)})
            outputs.begin()

    monkeypatch.setattr("cli.job.claim._undo", lambda *_: None)
    calls, number, was_reached = killing(function, monkeypatch), 0, True
    while was_reached:
        number += 1
        directory = tmp_path / str(number)
        directory.mkdir()
        replace_result(directory, "old")
        calls[0] = number
        with contextlib.suppress(SystemExit):
            replace_result(directory, "new")
        was_reached, calls[0] = calls[0] <= 0, -1
        recover(directory)
        texts = [file.read_text() for file in directory.glob("model*")]
        assert texts in (["old"] * 2, ["new"] * 2) and not (directory / REPLACED).exists(), number
    assert number > 1


def test_of_two_results_at_once_the_second_is_refused(tmp_path: Path) -> None:
    """Both had looked at the empty directory before either had its lock."""
    settings = settings_of(tmp_path, overwrite=False)
    for _ in range(2):
        Outputs.read(tmp_path).check_for(settings, resumes=False)
    with claim(settings) as outputs:
        write(outputs, RESULT, config__json="first")
        outputs.begin()
    with pytest.raises(UserError, match="holds a checkpoint already"), claim(settings):
        pass
    assert (tmp_path / "config.json").read_text() == "first"
