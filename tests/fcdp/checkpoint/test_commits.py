"""What lies in a commit: found damaged byte by byte, refused when it means harm, kept from two runs at once."""

import contextlib
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor, Shard

import fcdp
import fcdp.checkpoint
from common.errors import FinetuneError, UserError
from common.store.manifest import read_sealed, write_sealed
from fcdp.checkpoint import MANIFEST, Commit, ShardedCheckpoints, VerifiedCheckpoint
from tests.helpers.fcdp.pool import Pool, RankError

SHAPES = {"wide": (7, 300), "flat": (5,), "long": (1100, 3), "less than ranks": (2, 2)}


def whole(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(name))
    dtype = torch.bfloat16 if name == "flat" else torch.float32
    return torch.randn(SHAPES[name], generator=generator).to(dtype)


def shards(topology: fcdp.Topology, replicas: int = 1) -> dict[str, torch.Tensor]:
    """Sharded over ``world / replicas`` ranks, by rows as FSDP2 does it."""
    mesh = topology.shard_mesh(topology.world_size // replicas)
    found: dict[str, torch.Tensor] = {}
    for name, shape in SHAPES.items():
        part = -(-shape[0] // (topology.world_size // replicas))
        place = topology.rank % (topology.world_size // replicas)
        local = whole(name)[place * part : (place + 1) * part].clone()
        strides = whole(name).stride()
        found[name] = DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size(shape), stride=strides)
    return found


def save(topology: fcdp.Topology, directory: Path, replicas: int = 1) -> None:
    fcdp.checkpoint.PIECE_BYTES = 2000  # rows of "wide" are 1,200 bytes
    commits = ShardedCheckpoints(directory)
    for step in (3, 4):
        commits.save(step, shards(topology, replicas), {"user": step})


def load(topology: fcdp.Topology, directory: Path, replicas: int = 1) -> dict[str, Any]:
    fcdp.checkpoint.PIECE_BYTES = 2000
    commits, state, wanted = (
        ShardedCheckpoints(directory),
        shards(topology, replicas),
        shards(topology, replicas),
    )
    for value in state.values():
        value.to_local().zero_()  # type: ignore[attr-defined]
    manifest = commits.read_newest()
    assert manifest is not None
    commits.load(manifest, state)
    for name, value in state.items():
        assert torch.equal(value.to_local(), wanted[name].to_local()), name  # type: ignore[attr-defined]
    return manifest.description


def lock_twice(topology: fcdp.Topology, directory: Path) -> str:
    """Of two ranks the first one locks; what the second one reports."""
    commits = ShardedCheckpoints(directory)
    if topology.rank == 0:
        commits.lock()
    torch.distributed.barrier()
    said = ""
    try:
        if topology.rank == 1:
            ShardedCheckpoints(directory).verify()
    except UserError as error:
        said = str(error)
    torch.distributed.barrier()
    commits.close()
    return said


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcdp.checkpoint, "PIECE_BYTES", 2000)


@pytest.fixture(scope="module")
def committed(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made by two nodes that hold copies, of two ranks each."""
    directory = tmp_path_factory.mktemp("run") / "commits"
    pool.run((2, 2), save, directory, 2)
    return directory


def test_other_numbers_of_ranks_read_it_and_copies_are_written_once(pool: Pool, committed: Path) -> None:
    assert [path.name for path in committed.iterdir()] == ["step-4"]
    for layout, replicas in (((3, 1), 1), ((2, 2), 2), ((2, 2), 1), ((1, 1), 1)):
        assert pool.run(layout, load, committed, replicas)[0] == {"user": 4}
    files = sorted((committed / "step-4").glob("*.safetensors"))
    assert len(files) == 4, "nodes take turns with what both have"
    held: dict[str, int] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:  # any tool can read it
            for name in sorted(opened.keys()):
                held[name] = held.get(name, 0) + opened.get_tensor(name).shape[0]
    assert held == {name: shape[0] for name, shape in SHAPES.items()}
    pieces = Commit.read(committed / "step-4")["tensors"]["long"]["pieces"]
    assert len(pieces) > 5 and all((stop - start) * 12 <= 2000 for _, _, start, stop, _ in pieces)


def test_any_flipped_bit_is_found_and_named(pool: Pool, committed: Path) -> None:
    """In ranks' files: which tensor and file. In the manifest: that it is damaged."""
    good = ShardedCheckpoints(committed).verify()
    assert not good.damage and good.nbytes == sum(f.stat().st_size for f in committed.glob("*/*.safetensors"))
    draw = random.Random(7)
    tensors = set()
    for file in sorted(committed.glob("*/*")):
        content = file.read_bytes()
        for place in [0, len(content) - 1, *(draw.randrange(len(content)) for _ in range(12))]:
            with flipped(file, place):
                if file.name == MANIFEST:
                    with pytest.raises(FinetuneError, match="is damaged"):
                        ShardedCheckpoints(committed).verify()
                    continue
                found: VerifiedCheckpoint = ShardedCheckpoints(committed).verify()
                assert len(found.damage) == 1 and str(file) in found.damage[0], (file.name, place)
                tensors |= {
                    name for name in SHAPES if found.damage[0].startswith(f"{name} is damaged: its rows")
                }
    assert tensors >= {"wide", "long"}
    last = sorted(committed.glob("*/*.safetensors"))[-1]
    with (
        flipped(last, last.stat().st_size - 1),
        pytest.raises(RankError, match="is damaged: its rows") as caught,
    ):
        pool.run((2, 1), load, committed)
    assert str(caught.value).count("are not what was written there") == 2, "every rank reports it"


class flipped:
    """While it is open, one bit of a file is another."""

    def __init__(self, file: Path, place: int):
        self._file, self._place, self._content = file, place, file.read_bytes()

    def __enter__(self) -> None:
        changed = bytearray(self._content)
        changed[self._place] ^= 0x10
        self._file.write_bytes(changed)

    def __exit__(self, *exception: object) -> None:
        self._file.write_bytes(self._content)


def test_files_that_are_gone_or_short_are_named(committed: Path) -> None:
    file = sorted(committed.glob("*/*.safetensors"))[1]
    content = file.read_bytes()
    try:
        file.write_bytes(content[:-5])
        assert [
            f"{file} has {len(content) - 5:,} bytes" in one
            for one in ShardedCheckpoints(committed).verify().damage
        ] == [True]
        file.unlink()
        assert [file.name in one for one in ShardedCheckpoints(committed).verify().damage] == [True]
    finally:
        file.write_bytes(content)


def test_commits_of_other_formats_are_rejected(tmp_path: Path, committed: Path) -> None:
    old = tmp_path / "step-7"
    old.mkdir()
    newer = read_sealed(committed / "step-4" / MANIFEST)
    write_sealed(old / MANIFEST, {**newer, "format": 99})  # type: ignore[dict-item]
    assert ShardedCheckpoints(tmp_path).newest() == 7
    with pytest.raises(UserError, match=r"in format 99\. This version of the program reads format 2"):
        ShardedCheckpoints(tmp_path).describe(7)
    (tmp_path / "step-9").mkdir()  # of a commit that was being removed
    assert ShardedCheckpoints(tmp_path).newest() == 7
    ShardedCheckpoints(tmp_path).begin()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["commits.json", "step-9"]


def test_commits_of_another_run_and_renamed_ones_are_refused(tmp_path: Path, committed: Path) -> None:
    """Their checksums are right."""
    content = read_sealed(committed / "step-4" / MANIFEST)
    assert content is not None
    commits = ShardedCheckpoints(tmp_path)
    commits.begin()
    for name, store in (("step-4", commits.identity()), ("step-5", commits.identity()), ("step-6", "other")):
        (tmp_path / name).mkdir()
        write_sealed(
            tmp_path / name / MANIFEST, {**content, "store": store, "step": 6 if store == "other" else 4}
        )
    assert commits.describe(4) == content["description"]
    with pytest.raises(UserError, match="step-5 holds step 4, and was copied or renamed"):
        commits.describe(5)
    with pytest.raises(UserError, match="step-6 holds step 6 of another run, and was copied or renamed"):
        commits.describe(6)


def test_one_run_at_a_time(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "incomplete").mkdir()
    (tmp_path / "incomplete" / "rank-00000.safetensors").touch()
    assert "in use by another run" in pool.run((2, 1), lock_twice, tmp_path)[1]
    assert list(tmp_path.iterdir()) == []


def test_an_older_commit_goes_when_the_newest_is_known_to_be_whole(
    pool: Pool, committed: Path, tmp_path: Path
) -> None:
    """A run was killed between its commit and the removal of the one before."""
    directory = tmp_path / "commits"
    shutil.copytree(committed, directory)
    newest = read_sealed(directory / "step-4" / MANIFEST)
    assert newest is not None
    shutil.copytree(directory / "step-4", directory / "step-5")
    write_sealed(directory / "step-5" / MANIFEST, {**newest, "step": 5})
    for file in sorted((directory / "step-5").iterdir()):
        with (
            flipped(file, file.stat().st_size - 1),
            pytest.raises(RankError, match=r"rm -r .*step-5, then continue"),
        ):
            pool.run((1, 1), settle, directory)
        assert (directory / "step-4").is_dir()
    assert pool.run((1, 1), settle, directory) == [5]
    assert [path.name for path in directory.glob("step-*")] == ["step-5"]


def settle(topology: fcdp.Topology, directory: Path) -> int | None:
    commits = ShardedCheckpoints(directory)
    with contextlib.closing(commits):
        commits.lock()
        newest = commits.read_newest()
    return None if newest is None else newest.step


def test_a_commit_without_its_manifest_is_damaged_and_not_absent(committed: Path) -> None:
    """Else a run in memory would begin again, over its result."""
    checkpoints = ShardedCheckpoints(committed)
    step = checkpoints.newest()
    assert step is not None
    (committed / f"step-{step}" / MANIFEST).unlink()
    assert checkpoints.newest() == step
    with pytest.raises(FinetuneError, match=r"has lost its commit\.json"):
        checkpoints.verify()
