"""No committed step is lost silently: in every state of output and drives, a run is continued, finished, or refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from cli.job.outputs import RESULT, Outputs
from cli.job.resumed import decided
from cli.options.command import parse_command_line
from cli.options.config_file import effective_config, plain_options
from cli.options.run_record import RUN, described_stores, note_end
from cli.options.settings import Settings, settings_of, store_name
from common.errors import UserError
from common.store import Layout, commit_manifest
from common.store.directories import create_directories, find_directories
from common.store.folders import successor_folder
from common.store.manifest import write_sealed
from fcdp.checkpoint import ShardedCheckpoints


def layout(directories: int) -> Layout:
    result = Layout(directories)
    result.allocate("weights.0", 4096)
    return result


WAYS = {"plain": [], "resume": ["--resume"], "auto": ["--resume", "auto"], "overwrite": ["--overwrite"]}


class Scene:
    """An output and two drives with a run that was killed, or has ended."""

    def __init__(self, folder: Path, commits: bool = False) -> None:
        self.output, self.drives = folder / "out", [folder / "a", folder / "b"]
        for path in (self.output, *self.drives):
            path.mkdir()
        self.in_memory = commits
        where = ["--nodes", "1"] if commits else ["--ssd", *map(str, self.drives)]
        self.line = ["--model", "llama-10m", "--data", "random", "--output", str(self.output), *where]
        self.config = effective_config(parse_command_line(self.line), of_run=True)
        self.stores = [drive / store_name(self.output, resume=False) for drive in self.drives]
        if commits:
            self.stores = [self.output / "commits"]

    def fill(self) -> None:
        for store in self.stores:
            store.mkdir()
        if self.in_memory:
            ShardedCheckpoints(self.stores[0]).begin()
        else:
            create_directories(self.stores, layout(len(self.stores)), overwrite=False)

    def commit(self, step: int = 3) -> None:
        user = {"run": {}, "options": plain_options(self.config)}
        if not self.in_memory:
            commit_manifest(self.stores[0], {"step": step, "user": user})
            return
        folder = self.stores[0] / f"step-{step}"
        folder.mkdir()
        write_sealed(folder / "commit.json", {"format": 2, "step": step, "description": {"user": user}})

    def record(self, kind: str) -> None:
        """Write what a run writes before its first step (``begun``), or at its end, or an earlier version (``old``)."""
        if kind == "none":
            return
        (self.output / RUN).mkdir()
        content = {"id": "x", "calls": [{"steps": 9}]} | (
            described_stores(self.stores) if kind != "old" else {}
        )
        (self.output / RUN / "run.json").write_text(json.dumps(content))
        (self.output / RUN / "config.toml").write_text(self.config)
        (self.output / RUN / "metrics.jsonl").write_text('{"step": 3}\n')
        if kind == "ended":
            outputs = Outputs(self.output, "x")
            (outputs.prepare(RESULT) / "config.json").write_text("{}")
            outputs.put(RESULT)
            note_end(self.output, 3)

    def decide(self, words: list[str]) -> str:
        """What the command does: ``continued``, ``begun``, ``finished``, or why it refuses."""
        line = [*self.line, *words]
        try:
            settings = decided(settings_of("train", parse_command_line(line), tuple(line)))
            if not self.in_memory:
                self._open(settings)
            return "continued" if settings.resume else "begun"
        except click.exceptions.Exit:
            return "finished"
        except UserError as error:
            return str(error)

    def _open(self, settings: Settings) -> None:
        for store in self.stores:
            store.mkdir(exist_ok=True)
        if settings.resume:
            find_directories(self.stores)
        else:
            create_directories(self.stores, layout(len(self.stores)), overwrite=settings.overwrite)


def _keep(scene: Scene) -> None:
    pass


def _lose(*numbers: int, empty: bool) -> Callable[[Scene], None]:
    def lose(scene: Scene) -> None:
        for number in numbers:
            shutil.rmtree(scene.stores[number])
            if empty:
                scene.stores[number].mkdir()

    return lose


DAMAGE = {
    "whole": _keep,
    "no first": _lose(0, empty=False),
    "first empty": _lose(0, empty=True),
    "no second": _lose(1, empty=False),
    "second empty": _lose(1, empty=True),
    "none": _lose(0, 1, empty=False),
    "all empty": _lose(0, 1, empty=True),
    "no manifest": lambda scene: (scene.stores[0] / "manifest.json").unlink(missing_ok=True),
}


# A run has a commit before it has a record.
KINDS = [(True, "none"), (True, "begun"), (True, "ended"), (True, "old"), (False, "none")]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(("committed", "record"), KINDS)
def test_no_committed_step_is_lost(
    tmp_path: Path, committed: bool, record: str, damage: str, way: str
) -> None:
    scene = Scene(tmp_path)
    scene.fill()
    if committed:
        scene.commit()
    scene.record(record)
    DAMAGE[damage](scene)
    outcome = scene.decide(WAYS[way])
    refusal = outcome if " " in outcome else None
    if way == "overwrite":
        assert outcome == "begun"
        return
    whole, is_visible = damage == "whole", damage not in ("none", "all empty")
    if record == "ended" and way == "auto":
        assert outcome == "finished"
    elif committed and whole:
        if way == "plain":
            assert refusal and "holds a run already" in refusal and "--overwrite" in refusal
        else:
            assert outcome == "continued"
    elif (committed and record in ("begun", "old")) or (record == "ended" and way == "resume"):
        lost = scene.stores[0] if "second" not in damage else tmp_path  # what has the manifest
        assert refusal and str(lost) in refusal, outcome
        assert "--overwrite" in refusal or "--ssd" in refusal
    elif record == "ended" or (not is_visible and way != "resume"):
        # A finished run in which nothing is left to lose; or nothing to see
        assert outcome == "begun" or refusal
    elif way == "resume":
        assert refusal and str(tmp_path) in refusal, outcome
    elif committed and "second" in damage:
        assert refusal and str(tmp_path) in refusal and ("mount" in refusal.lower() or way == "plain"), (
            outcome
        )
    elif damage in ("whole", "no manifest"):
        assert outcome == "begun"  # it was never filled, and no step was taken
    else:
        assert refusal and "--ssd" in refusal and "striped over 2" in refusal, outcome


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("damage", ["whole", "none", "all empty"])
@pytest.mark.parametrize("record", ["none", "begun", "ended"])
@pytest.mark.parametrize("committed", [True, False], ids=["committed", "uncommitted"])
def test_nor_of_ranks_in_memory(tmp_path: Path, committed: bool, record: str, damage: str, way: str) -> None:
    scene = Scene(tmp_path, commits=True)
    scene.fill()
    if committed:
        scene.commit()
    scene.record(record)
    if damage != "whole":
        _lose(0, empty=damage == "all empty")(scene)
    outcome = scene.decide(WAYS[way])
    refusal = outcome if " " in outcome else None
    if way == "overwrite":
        assert outcome == "begun"
    elif record == "ended" and way == "auto":
        assert outcome == "finished"
    elif committed and damage == "whole":
        assert outcome == "continued" if way != "plain" else outcome == "begun" or refusal
        assert way != "plain" or record != "begun" or (refusal and "--overwrite" in refusal)
    elif record == "begun" and damage != "whole":
        assert refusal and str(scene.stores[0]) in refusal and "--overwrite" in refusal
    elif way == "resume":
        assert refusal and str(scene.output) in refusal
    else:
        assert outcome == "begun"  # without a commit nothing is lost


def test_an_open_move_is_never_begun_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.fill()
    successor_folder(scene.stores[0]).mkdir()
    for way in ("plain", "auto", "resume"):
        assert "was moving to other drives" in scene.decide(WAYS[way])


def test_a_store_that_is_being_filled_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from common.store import DirectoryLock

    monkeypatch.setattr("common.store.directories.PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(DirectoryLock.__init__, "__defaults__", (0.0,))
    scene = Scene(tmp_path)
    scene.fill()
    with DirectoryLock(scene.stores):
        assert "in use by another run" in scene.decide(WAYS["auto"])
    find_directories(scene.stores)


def test_a_run_elsewhere_is_named(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.fill()
    scene.commit()
    scene.record("begun")
    (tmp_path / "c").mkdir()
    stores, scene.line = scene.stores, [*scene.line[:-2], str(tmp_path / "c")]
    for way in ("plain", "auto"):
        refusal = scene.decide(WAYS[way])
        assert all(str(store) in refusal for store in stores) and "Correct --ssd" in refusal


def test_options_that_change_a_finished_run(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.fill()
    scene.commit()
    scene.record("ended")
    assert scene.decide(["--resume", "auto"]) == "finished"
    assert scene.decide(["--resume", "auto", "--steps", "20"]) == "continued"
    DAMAGE["none"](scene)
    refusal = scene.decide(["--resume", "auto", "--steps", "20"])
    assert "is finished (step 3)" in refusal and "not where it was" in refusal


def test_ranks_killed_while_they_filled_their_stores_begin_again(tmp_path: Path) -> None:
    """Some have their first commit then, which nobody has continued."""
    scene = Scene(tmp_path)
    scene.stores = [scene.stores[0] / f"rank-{rank}" for rank in range(2)]
    scene.stores[0].parent.mkdir()
    for store in scene.stores:
        store.mkdir()
        create_directories([store], layout(1), overwrite=False)
    commit_manifest(scene.stores[0], {"step": 0, "user": {}, "cluster": {"run": "r", "previous": None}})
    line = [*scene.line, "--nodes", "1", "--resume", "auto"]
    settings = decided(settings_of("train", parse_command_line(line), tuple(line)))
    assert settings.resume is False


@pytest.mark.parametrize("commits", [False, True], ids=["store", "in memory"])
@pytest.mark.parametrize("ended_after", [2, 4])
def test_a_run_whose_description_and_commit_are_of_two_times_is_not_finished(
    tmp_path: Path, ended_after: int, commits: bool
) -> None:
    """One of the two is from a backup. The commit, of step 3, counts, but does not replace a later result."""
    scene = Scene(tmp_path, commits)
    scene.fill()
    scene.commit()
    scene.record("ended")
    assert scene.decide(WAYS["auto"]) == "finished"
    note_end(scene.output, ended_after)
    decided = scene.decide(WAYS["auto"])
    assert (
        decided == "continued"
        if ended_after < 3
        else decided.startswith(f"The result in {scene.output} is that of")
    )


@pytest.mark.parametrize("kind", ["store", "commits"])
def test_a_copy_of_an_output_continues_with_its_own_options(tmp_path: Path, kind: str) -> None:
    """The original took more steps, with another learning rate; its directories are where the description says."""
    scene = Scene(tmp_path, commits=kind == "commits")
    words = ["--nodes", "1"] if scene.in_memory else []
    scene.stores = [scene.output / kind]

    def commit(step: int, rate: str) -> None:
        line = ["--model", "llama-10m", "--output", str(scene.output), *words, "--lr", rate]
        scene.config = effective_config(parse_command_line(line), of_run=True)
        scene.commit(step)

    def rate_of(output: Path) -> float:
        line = ["--output", str(output), *words, "--resume"]
        return settings_of("train", parse_command_line(line), tuple(line)).highest_lr

    scene.fill()
    commit(3, "0.25")
    scene.record("begun")
    copy = shutil.copytree(scene.output, tmp_path / "copy")
    commit(4, "0.5")
    assert (rate_of(scene.output), rate_of(copy)) == (0.5, 0.25)
    # What an earlier run has left in the output is not of the run that the description names.
    scene.stores = [tmp_path / kind]
    scene.fill()
    commit(5, "0.125")
    (copy / RUN / "run.json").write_text(json.dumps(described_stores(scene.stores)))
    assert rate_of(copy) == 0.125


@pytest.mark.parametrize("change", [Path.unlink, lambda file: file.write_text("")])
def test_a_finished_run_whose_result_is_damaged_is_not_finished(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    scene = Scene(tmp_path)
    scene.fill()
    scene.commit()
    scene.record("ended")
    assert scene.decide(WAYS["auto"]) == "finished"
    change(scene.output / "config.json")
    assert scene.decide(WAYS["auto"]) == "continued"


def test_the_store_of_a_run_that_was_replaced_is_not_continued(tmp_path: Path) -> None:
    """A later run with --overwrite on other drives left it; its files would go into that run's output."""
    scene = Scene(tmp_path)
    scene.fill()
    scene.commit()
    scene.record("begun")
    description = scene.output / RUN / "run.json"
    content = json.loads(description.read_text())
    for store in content["stores"]:
        store["store"], store["path"] = "later", f"{tmp_path}/c"
    description.write_text(json.dumps(content))
    for way in ("resume", "auto"):
        assert "holds the store of another run" in scene.decide(WAYS[way])


def test_a_finished_run_in_memory_whose_commits_are_lost_is_not_begun_again(tmp_path: Path) -> None:
    """With more steps to take, it would be replaced."""
    scene = Scene(tmp_path, commits=True)
    scene.fill()
    scene.record("ended")
    refusal = scene.decide(["--resume", "auto", "--steps", "9"])
    assert "is finished" in refusal and "add --overwrite" in refusal, refusal


def test_a_run_in_memory_that_has_lost_its_commits_is_not_begun_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path, commits=True)
    scene.fill()
    scene.record("begun")
    metrics = scene.output / RUN / "metrics.jsonl"
    metrics.write_text('{"step": 100}\n')  # at which it was committing
    assert scene.decide(WAYS["auto"]) == "begun"
    metrics.write_text('{"step": 101}\n')
    for way in ("resume", "auto"):
        assert "has no commit any more" in scene.decide(WAYS[way])


@pytest.mark.parametrize("commits", [True, False])
def test_a_store_without_its_identity_is_named(tmp_path: Path, commits: bool) -> None:
    scene = Scene(tmp_path, commits)
    scene.fill()
    scene.commit()
    scene.record("begun")
    name = "commits.json" if commits else "store.json"
    (scene.stores[0] / name).unlink()
    for way in ("resume", "auto"):
        assert f"{scene.stores[0] / name} is missing, which says" in scene.decide(WAYS[way])
