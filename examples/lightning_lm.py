"""A language model trained with Lightning, together with whoever else trains it.

The line with `DiLoCoStrategy` is all that makes this script a learner. Start a syncer first:

    diloco syncer --learners 2 --steps 400
    python examples/lightning_lm.py tcp://127.0.0.1:5555 --name a --seed 1
    python examples/lightning_lm.py tcp://127.0.0.1:5555 --name b --seed 2
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from common import BATCH, LEARNING_RATE, new_model, options, report, warmup
from diloco_lightning import DiLoCoStrategy
from diloco_plugin import shard
from text import held_out_text, training_text


class LanguageModel(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = new_model()

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
        self.log("held_out", self.model(**batch).loss)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        return [optimizer], [{"scheduler": warmup(optimizer), "interval": "step"}]


class Report(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step % 10 == 0:
            report(args.report, trainer.global_step, loss=trainer.callback_metrics["loss"])

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        report(args.report, trainer.global_step, held_out=trainer.callback_metrics["held_out"])


args = options(__doc__)
pl.seed_everything(args.seed)
mine = shard(training_text(), args.syncer, name=args.name)

trainer = pl.Trainer(
    strategy=DiLoCoStrategy(args.syncer, name=args.name, module="model"),  # the line
    accelerator="cpu",
    max_steps=args.steps,
    val_check_interval=max(1, args.steps // 8),
    check_val_every_n_epoch=None,
    num_sanity_val_steps=0,
    callbacks=[Report()],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(
    LanguageModel(),
    DataLoader(mine, BATCH, shuffle=True, drop_last=True),
    DataLoader(held_out_text(share=0.25), 60),
)
