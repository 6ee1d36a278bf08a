"""One run, two frameworks: a Hugging Face Trainer and a Lightning Trainer train one model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hf_tiny as tiny
import lightning.pytorch as pl
import torch
from diloco_lightning import DiLoCoStrategy
from diloco_transformers import DiLoCoCallback
from torch import Tensor
from torch.utils.data import DataLoader

from diloco_plugin.learner import Learner
from tests.syncers import global_model, running_syncer

STEPS = 12


class LanguageModel(pl.LightningModule):
    """The same kind of model, one attribute further down, and a parameter of its own beside it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.model = tiny.tiny_model(seed)
        self.temperature = torch.nn.Parameter(torch.ones(()))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).loss * self.temperature

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def hugging_face(folder: Path, address: str) -> tuple[dict[str, Tensor], Learner]:
    callback = DiLoCoCallback(address, name="hf", data_seed=1)
    trainer = tiny.trainer_of(folder, STEPS, [callback], model=tiny.tiny_model(1))
    trainer.train()
    assert callback.learner is not None
    return tiny.weights(trainer.model), callback.learner


def test_a_lightning_and_a_hugging_face_trainer_train_one_model(tmp_path: Path) -> None:
    module = LanguageModel(seed=2)
    start = tiny.weights(module.model)
    strategy: Any = None
    merged: list[float] = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            metrics = strategy.callback.learner.metrics()
            merged.append(metrics["diloco/pushes_merged"])

    # In lockstep each of the two is in every round, and both end with the same version.
    values = {"sync_every": 3, "fragments": 2, "overlap": 1, "learners": 2}
    with running_syncer(preset="streaming", **values) as syncer, ThreadPoolExecutor() as pool:
        strategy = DiLoCoStrategy(syncer.address, name="lightning", module="model", data_seed=2)
        other = pool.submit(hugging_face, tmp_path, syncer.address)
        pl.Trainer(
            strategy=strategy,
            accelerator="cpu",
            max_steps=STEPS,
            callbacks=[Watch()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(module, DataLoader(tiny.rows(64, seed=2), batch_size=tiny.BATCH))  # type: ignore[arg-type]
        theirs, learner = other.result(60)
        found, status = global_model(syncer), syncer.status()

    ours = tiny.weights(module.model)
    assert ours.keys() == theirs.keys() == found.keys()  # the names of the Hugging Face model
    assert tiny.same(found, ours)
    assert tiny.same(found, theirs)
    assert not tiny.same(start, found)
    assert status["clock"] == STEPS
    assert status["fates"]["rejected"] == {}
    assert not any(status["refused"].values())
    # Both took part, and both counted a token as a token.
    assert merged[-1] >= 2
    assert learner.metrics()["diloco/pushes_merged"] >= 2
    assert strategy.callback.state_dict()["tokens"] == STEPS * tiny.TOKENS
    assert learner.metrics()["diloco/tokens"] == STEPS * tiny.TOKENS
