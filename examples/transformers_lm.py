"""A language model trained with the Hugging Face Trainer, together with whoever else trains it.

The line with `DiLoCoCallback` is all that makes this script a learner. Start a syncer first:

    diloco syncer --learners 2 --steps 400
    python examples/transformers_lm.py tcp://127.0.0.1:5555 --name a --seed 1
    python examples/transformers_lm.py tcp://127.0.0.1:5555 --name b --seed 2
"""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from common import BATCH, LEARNING_RATE, WARMUP, new_model, options, report
from diloco_plugin import shard
from diloco_transformers import DiLoCoCallback
from text import held_out_text, training_text


class Report(TrainerCallback):
    def on_log(self, _: Any, state: Any, __: Any, logs: dict[str, float], **___: Any) -> None:
        if "loss" in logs:
            report(args.report, state.global_step, loss=logs["loss"])
        if "eval_loss" in logs:
            report(args.report, state.global_step, held_out=logs["eval_loss"])


args = options(__doc__)
set_seed(args.seed)
mine = shard(training_text(), args.syncer, name=args.name)

trainer = Trainer(
    new_model(),
    TrainingArguments(
        output_dir="trainer",
        max_steps=args.steps,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=60,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=WARMUP,
        max_grad_norm=0.0,
        seed=args.seed,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=max(1, args.steps // 8),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    ),
    train_dataset=mine,
    eval_dataset=held_out_text(share=0.25),
    callbacks=[
        DiLoCoCallback(args.syncer, name=args.name),  # the line
        Report(),
    ],
)
trainer.train()
