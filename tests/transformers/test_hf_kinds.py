"""Other models, other trainers: PEFT, TRL, compiled, and what cannot be synced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hf_tiny as tiny
import pytest
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from diloco_transformers import DiLoCoCallback
from transformers import LlamaConfig, LlamaForCausalLM

from diloco_plugin.errors import UnsupportedError
from diloco_plugin.modelfile import write_folder
from tests.syncers import running_syncer


def adapted(seed: int = 0) -> Any:
    from peft import LoraConfig, get_peft_model

    model = tiny.tiny_model()
    torch.manual_seed(seed)
    return get_peft_model(
        model,
        LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True),
    )


def test_of_a_peft_model_only_the_adapter_travels(tmp_path: Path) -> None:
    from peft import PeftModel, get_peft_model_state_dict

    out = tmp_path / "adapter.safetensors"
    with running_syncer(sync_every=4, fragments=2, config={"export": str(out)}) as syncer:
        model = adapted()
        base = model.get_base_model().transformer.wte.weight.detach().clone()
        trainer = tiny.trainer_of(tmp_path, 6, [DiLoCoCallback(syncer.address)], model=model)
        trainer.train()
        sent = sum(f["elements"] for f in syncer.status()["fragments"])
        second = adapted(seed=1)
        recorder = tiny.Recorder("on_step_begin")
        callbacks = [recorder, DiLoCoCallback(syncer.address)]
        tiny.trainer_of(tmp_path, 1, callbacks, model=second).train()
    assert sent == sum(w.numel() for w in tiny.weights(model).values())
    assert sent < base.numel()
    assert torch.equal(base, model.get_base_model().transformer.wte.weight)
    assert tiny.same(tiny.weights(model), recorder.seen[0])

    # What the syncer publishes is an adapter that PEFT loads.
    exported = tiny.stored(out)
    assert tiny.same(tiny.weights(second), exported)
    config = out.with_name("adapter.config.json").read_text()
    assert json.loads(config)["peft_type"] == "LORA"
    write_folder(tmp_path / "published", exported, config)
    loaded = PeftModel.from_pretrained(tiny.tiny_model(), tmp_path / "published")
    assert tiny.same(get_peft_model_state_dict(loaded), get_peft_model_state_dict(second))


def test_frozen_parameters_stay_at_home(tmp_path: Path) -> None:
    with running_syncer(sync_every=4, fragments=2) as syncer:
        model = tiny.tiny_model()
        model.transformer.wpe.weight.requires_grad_(False)
        tiny.trainer_of(tmp_path, 2, [DiLoCoCallback(syncer.address)], model=model).train()
        sent = sum(f["elements"] for f in syncer.status()["fragments"])
    assert sent == sum(w.numel() for w in tiny.weights(model).values())
    assert sent == sum(p.numel() for p in model.parameters()) - tiny.LENGTH * 16


def test_one_part_of_a_model_can_be_shared_under_its_own_names(tmp_path: Path) -> None:
    out = tmp_path / "part.safetensors"
    with running_syncer(sync_every=4, fragments=2, config={"export": str(out)}) as syncer:
        callback = DiLoCoCallback(syncer.address, module="transformer.h")
        tiny.trainer_of(tmp_path, 2, [callback]).train()
    assert "0.attn.c_attn.weight" in tiny.stored(out)


def test_a_bf16_llama_ends_with_what_the_syncer_has_rounded(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=tiny.VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    out = tmp_path / "global.safetensors"
    with running_syncer(sync_every=4, fragments=2, config={"export": str(out)}) as syncer:
        tiny.trainer_of(tmp_path, 6, [DiLoCoCallback(syncer.address)], model=model).train()
        assert syncer.status()["fates"]["merged"] >= 2
    exported = {name: value.to(torch.bfloat16) for name, value in tiny.stored(out).items()}
    assert tiny.same(tiny.weights(model), exported)


def test_a_compiled_model_sees_what_comes_in(tmp_path: Path) -> None:
    out = tmp_path / "global.safetensors"
    with running_syncer(sync_every=4, fragments=2, config={"export": str(out)}) as syncer:
        callback = DiLoCoCallback(syncer.address)
        trainer = tiny.trainer_of(
            tmp_path, 6, [callback], torch_compile=True, torch_compile_backend="eager"
        )
        trainer.train()
    assert tiny.same(tiny.weights(trainer.model), tiny.stored(out))
    assert not any("_orig_mod" in name for name in tiny.stored(out))
    assert callback.learner is not None
    assert callback.learner.metrics()["diloco/tokens"] == 6 * tiny.TOKENS


def test_trl_trains_together_on_text(tmp_path: Path) -> None:
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    letters = {chr(97 + i): i for i in range(26)} | {"<e>": 26}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="<e>"))  # type: ignore[arg-type]
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # type: ignore[assignment]
    text = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>", pad_token="<e>")
    out = tmp_path / "global.safetensors"
    with running_syncer(sync_every=4, fragments=2, config={"export": str(out)}) as syncer:
        callback = DiLoCoCallback(syncer.address)
        args = tiny.arguments(tmp_path, 6).to_dict()
        kept = ("output_dir", "max_steps", "use_cpu", "report_to", "disable_tqdm", "save_strategy")
        trainer = SFTTrainer(
            model=tiny.tiny_model(),
            args=SFTConfig(
                **{key: args[key] for key in kept},
                per_device_train_batch_size=tiny.BATCH,
                max_length=tiny.LENGTH,
                bf16=False,
                logging_steps=1,
            ),
            train_dataset=Dataset.from_dict({"text": ["abc", "defgh"] * 8}),
            processing_class=text,
            callbacks=[callback],
        )
        trainer.train()
        assert syncer.status()["fates"]["merged"] >= 2
    assert tiny.same(tiny.weights(trainer.model), tiny.stored(out))
    assert callback.learner is not None
    metrics = callback.learner.metrics()
    assert metrics["diloco/steps"] == 6
    assert metrics["diloco/tokens"] == trainer.state.log_history[-2]["num_tokens"]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (DistributedType.DEEPSPEED, "fp32 masters"),
        (DistributedType.FSDP, "shards"),
        (DistributedType.MEGATRON_LM, "shards"),
    ],
)
def test_sharded_trainings_are_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: DistributedType, why: str
) -> None:
    trainer = tiny.trainer_of(tmp_path, 1, [])
    monkeypatch.setitem(PartialState._shared_state, "distributed_type", kind)
    callback = DiLoCoCallback("tcp://127.0.0.1:9")
    with pytest.raises(UnsupportedError, match=why):
        callback.on_init_end(trainer.args, trainer.state, trainer.control)
    with pytest.raises(UnsupportedError, match=why):
        callback.install(trainer)
