"""The configuration that travels with a model is the one that `save_pretrained` would write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from diloco_plugin.learner.modelconfig import model_config_json


def gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=8,
        n_positions=4,
        n_embd=4,
        n_layer=1,
        n_head=1,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def test_of_a_transformers_model(tmp_path: Path) -> None:
    model = gpt2()
    found = json.loads(model_config_json(model))
    assert found["architectures"] == ["GPT2LMHeadModel"]
    assert model.config.architectures is None  # the user's own object stays as it is
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert found.items() >= {k: v for k, v in saved.items() if k != "dtype"}.items()


def test_of_a_peft_model_it_is_that_of_the_adapter(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(gpt2(), lora)
    found = json.loads(model_config_json(model))
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    differing = {key for key in saved if saved[key] != found.get(key)}
    # PEFT notes the class of the base model where no task says it; an empty name is no name.
    assert differing <= {"auto_mapping", "base_model_name_or_path"}
    assert found["inference_mode"] is True
    assert found["target_modules"] == ["c_attn"]


class LooksLikeTheirs(nn.Linear):
    config: Any = None
    peft_config: Any = None


@pytest.mark.parametrize("config", [None, {}, object()])
@pytest.mark.parametrize("peft_config", [None, {}, {"default": object()}, "text"])
def test_of_any_other_model_there_is_none(config: Any, peft_config: Any) -> None:
    model = LooksLikeTheirs(2, 2)
    model.config, model.peft_config = config, peft_config
    assert model_config_json(model) == ""
    assert model_config_json(nn.Linear(2, 2)) == ""


def test_a_configuration_that_cannot_be_written_is_left_out() -> None:
    class Broken:
        def to_json_string(self) -> str:
            raise TypeError("a set has no place in JSON")

    model = LooksLikeTheirs(2, 2)
    model.config = Broken()
    assert model_config_json(model) == ""
