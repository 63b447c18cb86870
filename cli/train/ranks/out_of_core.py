"""Training of several ranks out of core, each node on its own SSDs."""

from collections.abc import Collection
from pathlib import Path

from cli.job.job import Job
from cli.job.resumed import check_same_run
from cli.train.engine_trainer import EngineTrainer, engine_options, profile_once
from cli.train.ranks.process import RankProcess
from common.communication import all_gather_object, broadcast_from_rank0
from common.store import load_manifest, remove
from common.store.folders import remove_folder
from fcdp.strategy.topology import Topology
from fuyou import Engine
from fuyou.checkpoint.run_files import rank_folder
from fuyou.runtime.ranks import share_of


def open_trainer(job: Job, topology: Topology, rank: RankProcess, launches: Collection[str]) -> EngineTrainer:
    """Open this rank's engine, which takes its part of every batch, given all nodes' launches. Collective."""
    broadcast_from_rank0(lambda: profile_once(job, share_of(topology)))
    engine = _open_engine(job, topology, launches)
    check_same_run(job, engine, launches)
    return EngineTrainer(job, engine, topology, lambda: rank.stopping)


def _open_engine(job: Job, topology: Topology, launches: Collection[str]) -> Engine:
    settings = job.settings
    folders = [path / job.run_name for path in job.ssd]
    leaving = [path / job.run_name for path in settings.drives_to_leave]
    name = rank_folder(topology.local_rank)
    continued = settings.resume or _is_restart(folders[0] / name, launches)
    for folder in folders:
        folder.mkdir(exist_ok=True)
        if topology.local_rank == 0 and not continued:  # what more ranks than now have left there, or a single one
            remove([folder])
            here = {rank_folder(number) for number in range(topology.ranks_per_node)}
            for path in folder.glob(rank_folder("*")):
                if path.name not in here:
                    remove_folder(path, shared=True)
    return Engine(
        **engine_options(job),
        ssd=folders,
        leave_ssd=[path for path in leaving if continued and path.is_dir()],
        device=topology.device,
        run_name=name,
        resume=continued,
        overwrite=True,  # the launcher would not have come so far if something were there that is to be kept
        batch_shape=(-(-settings.batch_size // topology.world_size) * settings.traits.rows, job.seq_len),
        topology=topology,
    )


def _is_restart(folder: Path, launches: Collection[str]) -> bool:
    """Return whether any rank's store was made by one of these launches: then a rank was lost, and all continue."""
    content = load_manifest(folder) if folder.exists() else None
    mine = bool(content and set(launches) & set(content["user"].get("launches", ())))
    return any(all_gather_object(mine))
