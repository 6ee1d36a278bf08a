"""A tiny model, data and Trainer: a step takes milliseconds, nothing is downloaded."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

# Threads of their own would cost such small models more than they bring.
torch.set_num_threads(1)

VOCABULARY = 32
LENGTH = 8
BATCH = 2
#: of one batch without padding
TOKENS = BATCH * LENGTH


def tiny_model(seed: int = 0, **config: Any) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    sizes = {"n_positions": LENGTH, "n_embd": 16, "n_layer": 1, "n_head": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **(sizes | ends | config)))


def rows(count: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Sequences that count up from a random start: learnable in a few steps."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(VOCABULARY, (count, 1), generator=generator)
    ids = (starts + torch.arange(LENGTH)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in ids]


def arguments(folder: Path, steps: int, **more: Any) -> TrainingArguments:
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": steps,
        "per_device_train_batch_size": BATCH,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**(values | more))


def trainer_of(
    folder: Path,
    steps: int,
    callbacks: Sequence[TrainerCallback],
    *,
    model: nn.Module | None = None,
    kind: type[Trainer] = Trainer,
    train: Any = None,
    evaluate: Any = None,
    **more: Any,
) -> Trainer:
    return kind(
        model=tiny_model() if model is None else model,
        args=arguments(folder, steps, **more),
        train_dataset=rows(64) if train is None else train,
        eval_dataset=evaluate,
        callbacks=list(callbacks),
    )


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of what is trained, tied weights once."""
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """To the bit, for all that `one` has."""
    return bool(one) and all(torch.equal(value, other[name]) for name, value in one.items())


def stored(path: Path | str) -> dict[str, Tensor]:
    return load_file(path)


class Recorder(TrainerCallback):
    """Copies the weights at every firing of one event."""

    def __init__(self, event: str) -> None:
        self.seen: list[dict[str, Tensor]] = []
        setattr(self, event, self._record)

    def _record(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.seen.append(weights(model))
