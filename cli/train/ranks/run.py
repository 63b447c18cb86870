"""``finetune --nodes``, as every rank runs it: meet the others, compare, prepare, train, export and report."""

import dataclasses
import os
import time

import torch.distributed as dist

from cli.job.job import Job
from cli.job.machine import with_dtype_of_all
from cli.job.resolve import check_start, resolve
from cli.job.resumed import decided, forget_earlier_run
from cli.options.settings import Settings
from cli.train.loop import train
from cli.train.ranks.in_memory import InMemoryTrainer
from cli.train.ranks.meeting import check_same_command, check_shared, meet
from cli.train.ranks.out_of_core import open_trainer
from cli.train.ranks.process import LAUNCH, RankProcess
from common.activity import activity


def train_rank(settings: Settings, rank: RankProcess) -> None:
    """Do the whole run, as this rank's part of it."""
    settings = dataclasses.replace(decided(settings), gpus_per_node=int(os.environ["LOCAL_WORLD_SIZE"]))
    if LAUNCH not in os.environ and not rank.restarted:  # our launcher has checked this
        check_start(settings, int(os.environ["LOCAL_WORLD_SIZE"]))
    store, placement, topology = meet(settings, rank)
    launches = check_same_command(settings, rank)
    settings = with_dtype_of_all(settings, str(topology.device), rank.restarted)
    job = _prepare(settings, rank, store)
    if placement is not None and rank.is_rank0 and not rank.restarted:
        print(f"nodes    {placement}", flush=True)
    check_shared(job.output)
    open_ = open_trainer if settings.ssd else InMemoryTrainer
    with activity("reading the weights, on every rank", announced=rank.is_rank0):
        trainer = open_(job, topology, rank, launches)
    try:
        train(job, trainer, rank)
    except Exception as error:  # leaves the trainer open: its threads may wait for ranks that will never answer
        if trainer.can_continue_after(error):
            error.add_note(job.settings.how_to_continue)
        raise
    dist.barrier()
    trainer.model.close()
    topology.close()
    dist.destroy_process_group()
    job.close()


def _prepare(settings: Settings, rank: RankProcess, store: dist.Store) -> Job:
    if rank.is_rank0:
        if not rank.restarted:
            forget_earlier_run(settings)
        with activity("preparing the run: model, memory, data", announced=True):
            job = resolve(settings)
        if not rank.restarted:
            print(job.header(), flush=True)
        store.set("prepared", "")
        return job
    speaks = os.environ["LOCAL_RANK"] == "0" and rank.node > 0
    if speaks:
        print(f"nodes    this is node {rank.node + 1} of {rank.nodes}: rank 0 reads the data first", flush=True)
    while not store.check(["prepared"]):  # not a collective: tokenizing may take longer than those may wait
        time.sleep(0.1)
    job = resolve(settings)
    if speaks:
        print("nodes    this node trains from here on; its figures are part of what rank 0 shows", flush=True)
    return job
