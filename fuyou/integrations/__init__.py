"""Other people's trainers on this engine: transformers.Trainer, TRL's, and loops with accelerate.

>>> engine = fuyou.Engine("path/to/checkpoint", ssd=["/mnt/nvme0"], max_grad_norm=1.0) >>> model = as_model(engine) >>>
trainer = Trainer(model, args, train_dataset=data, optimizers=(EngineOptimizer(model), None)) >>> trainer.train()
"""

from fuyou.integrations.model import FusedOutput, as_model, as_reference
from fuyou.integrations.optimizer import EngineOptimizer

__all__ = ["EngineOptimizer", "FusedOutput", "as_model", "as_reference"]
