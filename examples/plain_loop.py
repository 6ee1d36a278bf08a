"""A language model trained by a plain PyTorch loop, together with whoever else trains it.

The line with `attach` is all that makes this script a learner. Start a syncer first:

    diloco syncer --learners 2 --steps 400
    python examples/plain_loop.py tcp://127.0.0.1:5555 --name a --seed 1
    python examples/plain_loop.py tcp://127.0.0.1:5555 --name b --seed 2
"""

from __future__ import annotations

from itertools import islice

import torch
from torch.utils.data import DataLoader

from common import BATCH, LEARNING_RATE, new_model, options, report, warmup
from diloco_plugin import attach, shard
from text import training_text

args = options(__doc__)
torch.manual_seed(args.seed)
mine = shard(training_text(), args.syncer, name=args.name)
batches = DataLoader(mine, BATCH, shuffle=True, drop_last=True)

model = new_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
schedule = warmup(optimizer)

with attach(model, optimizer, args.syncer, name=args.name, data_seed=args.seed) as learner:  # it
    for step, batch in enumerate(islice(batches, args.steps), start=1):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            report(args.report, step, loss=loss.item())
        if learner.should_stop:
            break
