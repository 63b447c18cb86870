"""The timeline on its own: resumes the store that the engine's section has left, or makes one."""

from transformers import logging

from gpu.journal import Check
from gpu.presets import (
    RUN_NAME,
    clear_stores,
    model_config,
    open_engine,
    random_batch,
    train_step,
)
from gpu.profiling import profile_step


def run(check: Check) -> None:
    check.need_cuda()
    logging.set_verbosity_error()
    preset = check.name.partition(":")[2]
    settings, config = check.settings, model_config(preset)
    left_by_engine = check.earlier(f"engine:{preset}")
    measured = [row["batch"] for row in left_by_engine.get("rows", []) if "seconds" in row]
    rows = max(measured, default=settings.batches[0])
    left = bool(left_by_engine) and (check.ssd / RUN_NAME).is_dir()
    single = bool(left_by_engine["single_slot"]) if left else True
    with open_engine(
        settings, config, single_slot=single, resume=left, overwrite=not left, batch_shape=(rows, settings.seq_len)
    ) as engine:
        batch = random_batch(config, rows, settings.seq_len)
        for _ in range(2):
            train_step(engine, batch)
        check.note(**profile_step(engine, batch, settings, check.name.replace(":", "-")))
    clear_stores(check.ssd)
