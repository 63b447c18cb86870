"""A run that is replaced leaves no store: also where the new one writes to other drives, or under another name."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.job.claim import claim, recover
from cli.job.outputs import RESULT, Outputs
from cli.options.run_record import described_stores
from cli.options.settings import Settings
from common.errors import UserError
from common.store import Layout, commit_manifest
from common.store.directories import DirectoryLock, create_directories
from common.store.manifest import write_sealed
from fcdp.checkpoint import ShardedCheckpoints
from tests.cli.conftest import Finetune
from tests.helpers.command.messages import check


class Scene:
    """An output, and two drives of its run."""

    def __init__(self, folder: Path) -> None:
        self.output, self.drives = folder / "out", [folder / "a", folder / "b"]
        for path in (self.output, *self.drives):
            path.mkdir()

    def settings(self, **options: Any) -> Settings:
        return Settings(**{"model": "llama-10m", "output": self.output, "overwrite": True, **options})

    def begin(self, settings: Settings, kill: bool = False) -> None:
        """Do what a run does until its first commit is there, and noted in its description."""
        with claim(settings) as outputs:
            if kill:
                raise SystemExit
            for store in settings.stores:
                store.mkdir(exist_ok=True)
            if settings.in_memory:
                commits = ShardedCheckpoints(settings.stores[0])
                commits.begin()
                (commits.directory / "step-1").mkdir()
                write_sealed(commits.directory / "step-1/commit.json", {"format": 2})
            else:
                layout = Layout(len(settings.stores))
                layout.allocate("weights.0", 4096)
                create_directories(settings.stores, layout, overwrite=True)
                commit_manifest(settings.stores[0], {"step": 1, "user": {}})
            outputs.begin()
            description = {"id": outputs.id, "output": str(settings.output_directory.resolve())}
            content = {**description, **described_stores(settings.stores)}
            (settings.output_directory / "run/run.json").write_text(json.dumps(content))


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def _drives(scene: Scene) -> dict[str, Any]:
    return {"ssd": tuple(map(str, scene.drives))}


def _by_link(scene: Scene) -> dict[str, Any]:
    link = scene.output.with_name("link")
    if not link.exists():
        link.symlink_to(scene.output)
    return {**_drives(scene), "output": link}


WAYS: dict[str, Callable[[Scene], dict[str, Any]]] = {
    "drives": _drives,
    "one drive": lambda scene: {"ssd": (str(scene.drives[1]),)},
    "link": _by_link,
    "output": lambda scene: {},
    "memory": lambda scene: {"nodes": 1},
}


@pytest.mark.parametrize("after", WAYS)
@pytest.mark.parametrize("before", WAYS)
def test_no_store_of_a_replaced_run_stays(
    before: str, after: str, scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier, later = (scene.settings(**WAYS[name](scene)) for name in (before, after))
    scene.begin(earlier)
    with pytest.raises(SystemExit):
        scene.begin(later, kill=True)
    assert all(store.is_dir() for store in earlier.stores), "it costs nothing to fail before the first commit"
    scene.begin(later)
    there = [folder for folder in [*earlier.stores, *later.stores] if folder.exists()]
    assert set(there) == set(later.stores)
    moved = set(earlier.stores) - set(later.stores)
    assert capsys.readouterr().out.count("removed ") == len(moved)


def test_what_was_set_aside_comes_back_also_where_the_output_was_moved(scene: Scene, tmp_path: Path) -> None:
    """The new run was killed before it changed the store, and somebody moved the directory."""
    scene.begin(scene.settings())
    outputs = Outputs.read(scene.output)
    (outputs.prepare(RESULT) / "config.json").write_text("of the earlier run")
    outputs.put(RESULT)
    child = os.fork()
    if not child:
        with claim(scene.settings()):
            os._exit(0)
    os.waitpid(child, 0)
    assert (scene.output / ".replaced/config.json").exists()
    moved = scene.output.rename(tmp_path / "moved")
    recover(moved)
    assert (moved / "config.json").read_text() == "of the earlier run" and not (moved / ".replaced").exists()


@pytest.mark.parametrize("name", ["run", "store", "checkpoints", "base", ".replaced", "commits"])
@pytest.mark.parametrize("resumes", [True, False])
def test_a_link_into_another_output_is_refused(
    scene: Scene, tmp_path: Path, name: str, resumes: bool
) -> None:
    """Its run would be changed; one to another drive changes none."""
    scene.begin(scene.settings())
    (scene.output / name).mkdir(exist_ok=True)
    other, elsewhere = tmp_path / "other", tmp_path / "elsewhere"
    for path in (other, elsewhere):
        path.mkdir()
    (other / name).symlink_to(scene.output / name)
    settings = scene.settings(output=other, resume=resumes, overwrite=not resumes)
    refused = pytest.raises(
        UserError, match=rf"other/{name} lies in {scene.output / name}, .* give another --output"
    )
    with refused, claim(settings):
        pass
    (other / name).unlink()
    (other / name).symlink_to(elsewhere)
    with claim(settings):
        pass


def test_the_store_of_a_copied_output_is_named_and_stays(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = scene.settings(**_drives(scene))
    scene.begin(settings)
    copy = shutil.copytree(scene.output, scene.output.with_name("copy"))
    scene.begin(scene.settings(output=copy))
    said = capsys.readouterr().out
    for store in settings.stores:
        assert (store / "store.json").exists() and f"kept     {store}: " in said and "rm -r" not in said
        assert f"the store of the run in {scene.output}, of which this output was a copy" in said
    shutil.rmtree(copy)
    shutil.copytree(scene.output, copy)
    shutil.rmtree(scene.output)
    scene.begin(scene.settings(output=copy))
    assert all(f"rm -r {store}" in capsys.readouterr().out for store in settings.stores[:1])


def test_a_store_in_use_is_named_and_stays(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    settings = scene.settings(**WAYS["one drive"](scene))
    scene.begin(settings)
    with DirectoryLock(settings.stores):
        scene.begin(scene.settings())
    assert "in use by another run" in capsys.readouterr().out and (settings.stores[0] / "store.json").exists()


def test_killed_while_the_store_is_removed_the_next_command_ends_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = scene.settings(**_drives(scene))
    scene.begin(settings)
    with monkeypatch.context() as patch:
        patch.setattr("cli.job.replaced._remove_store", _die)
        with pytest.raises(SystemExit):
            scene.begin(scene.settings())
    assert all(store.is_dir() for store in settings.stores)
    recover(scene.output)
    assert not any(store.is_dir() for store in settings.stores)


def _die(path: Path) -> None:
    raise SystemExit


SMALL = ("--batch-size", 2, "--seq-len", 32, "--gpu", "cpu", "--steps", 2)


@pytest.mark.slow
def test_whole_runs_leave_one_store(finetune: Finetune, checkpoint: Path, data: Path, scene: Scene) -> None:
    line = ("--model", checkpoint, "--data", data, *SMALL)
    link = _by_link(scene)["output"]
    assert finetune(*line, "--output", scene.output, "--ssd", scene.drives[0]).status == 0
    assert finetune(*line, "--output", link, "--ssd", *scene.drives, "--overwrite").status == 0
    assert [len(list(drive.iterdir())) for drive in scene.drives] == [1, 1]
    ranks = finetune(*line, "--output", scene.output, "--nodes", 1, "--overwrite")
    assert ranks.status == 0 and ranks.out.count("removed ") == 2, ranks.err
    assert [len(list(drive.iterdir())) for drive in scene.drives] == [0, 0]
    assert finetune(*line, "--output", scene.output, "--overwrite").status == 0
    assert not (scene.output / "commits").exists()


@pytest.mark.slow
def test_copies_of_an_output_do_not_share_a_store(
    finetune: Finetune, checkpoint: Path, data: Path, scene: Scene
) -> None:
    output, drive, copy = scene.output, scene.drives[0], scene.output.with_name("copy")
    line = ("--model", checkpoint, "--data", data, *SMALL, "--schedule", "constant", "--ssd", drive)
    assert finetune(*line, "--output", output).status == 0
    shutil.copytree(output, copy)
    assert finetune(*line, "--output", output, "--resume", "--steps", 5).status == 0
    for words in (("--resume", "--steps", 8), ("--resume", "auto", "--steps", 8)):
        refused = finetune(*line, "--output", copy, *words)
        check(
            refused, 2, f"was continued to step 5 in {output}", f"--output {output}", "is a copy", "at step 2"
        )
    moved = output.rename(output.with_name("elsewhere"))
    done = finetune(*line, "--output", copy, "--resume", "--steps", 8)
    assert done.status == 0, done.err
    for name in ("run/metrics.jsonl", "losses.jsonl"):
        assert f"gap      {name} has no lines for steps 3 to 4: " in done.out
    check(finetune("--output", moved, "--resume", "--steps", 9), 2, f"was continued to step 8 in {copy}")
    # The name of the store is that of the output where the run was begun.
    check(finetune(*line, "--output", output, "--overwrite"), 2, f"the store of the run in {copy}")


def test_logs_of_earlier_trackers_are_replaced_with_their_run(scene: Scene) -> None:
    """They come back with it, too."""
    scene.begin(scene.settings())
    log = scene.output / "run/trackers/deep/events"
    log.parent.mkdir(parents=True)
    log.write_text("of the earlier run")
    (log.parent / "newest").symlink_to("events")
    with pytest.raises(SystemExit):
        scene.begin(scene.settings(), kill=True)
    assert log.read_text() == "of the earlier run" and (log.parent / "newest").is_symlink()
    scene.begin(scene.settings())
    assert not (scene.output / "run/trackers").exists() and not (scene.output / ".replaced").exists()
