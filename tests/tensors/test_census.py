from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.testing._internal.two_tensor import TwoTensor  # made of tensors, like DTensor

from diloco_plugin.errors import LayoutError
from diloco_plugin.tensors.layout import (
    BUFFER,
    EMBEDDING,
    WEIGHT,
    Census,
    build_layout,
    canonical_name,
    census,
)


class Wrapper(nn.Module):
    """Like DDP and Fabric: the model under one more name."""

    def __init__(self, name: str, model: nn.Module) -> None:
        super().__init__()
        self.add_module(name, model)


class Holder(nn.Module):
    def __init__(self, **children: Any) -> None:
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


def convnet() -> nn.Sequential:
    return nn.Sequential(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(6, 2))


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=50, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def names(found: Census) -> list[str]:
    return [spec.name for spec in found.specs]


def kinds(found: Census) -> dict[str, str]:
    return {spec.name: spec.kind for spec in found.specs}


class TestNames:
    @pytest.mark.parametrize(
        ("raw", "name"),
        [
            ("0.weight", "0.weight"),
            ("module.0.weight", "0.weight"),
            ("_forward_module.module.net._orig_mod.0.weight", "net.0.weight"),
            ("_fsdp_wrapped_module.a._checkpoint_wrapped_module.b", "a.b"),
            ("module", "module"),
            ("net.module", "net.module"),
            ("my_module.weight", "my_module.weight"),
        ],
    )
    def test_wrappers_leave_no_trace(self, raw: str, name: str) -> None:
        assert canonical_name(raw) == name

    @pytest.mark.parametrize("wrapper", ["module", "_orig_mod", "_forward_module"])
    def test_wrapping_a_model_does_not_change_its_layout(self, wrapper: str) -> None:
        bare, wrapped = convnet(), Wrapper(wrapper, convnet())
        assert census(bare).specs == census(wrapped).specs
        inner = Holder(net=convnet())
        outer = Holder(net=Wrapper(wrapper, convnet()))
        assert census(inner).specs == census(outer).specs

    def test_compiling_a_model_does_not_change_its_layout(self) -> None:
        bare = convnet()
        expected = build_layout(census(bare).specs, 3)
        compiled = torch.compile(bare)
        assert isinstance(compiled, nn.Module)
        assert build_layout(census(compiled).specs, 3) == expected
        part = convnet()
        part[0].compile()  # in place: no wrapper at all
        assert build_layout(census(part).specs, 3) == expected
        part.add_module("0", torch.compile(part[0]))  # type: ignore[arg-type]
        assert build_layout(census(part).specs, 3) == expected

    def test_one_model_in_two_views_is_no_collision(self) -> None:
        net = nn.Linear(2, 2)
        model = Holder(module=net)
        model.weight = net.weight
        found = census(model)
        assert names(found) == ["bias", "weight"]
        assert not any(spec.alias_of for spec in found.specs)

    def test_two_tensors_under_one_name_are_refused_with_both_names(self) -> None:
        model = Holder(module=nn.Linear(2, 2), weight=nn.Parameter(torch.ones(2, 2)))
        with pytest.raises(LayoutError, match=r"weight and module\.weight are both called weight"):
            census(model)

    def test_a_buffer_under_the_name_of_a_parameter_is_refused(self) -> None:
        model = Holder(module=nn.Linear(2, 2))
        model.register_buffer("weight", torch.ones(2))
        with pytest.raises(LayoutError, match="weight is the name of a parameter and of a buffer"):
            census(model)


class TestWhoTakesPart:
    def test_the_live_tensors_themselves(self) -> None:
        model = convnet()
        found = census(model)
        assert found.tensors["0.weight"] is model[0].weight
        assert found.tensors["1.running_mean"] is model[1].running_mean

    def test_frozen_parameters_never(self) -> None:
        model = convnet()
        model[0].requires_grad_(False)
        assert not any(name.startswith("0.") for name in names(census(model)))

    def test_a_model_that_is_all_frozen_is_refused(self) -> None:
        with pytest.raises(LayoutError, match="no parameter that requires grad"):
            census(convnet().requires_grad_(False))

    def test_tied_parameters_once_under_the_name_that_saved_models_have(self) -> None:
        model = gpt2()
        found = census(model)
        specs = {spec.name: spec for spec in found.specs}
        assert specs["lm_head.weight"].alias_of == "transformer.wte.weight"
        assert specs["transformer.wte.weight"].alias_of == ""
        assert "lm_head.weight" not in found.tensors
        assert set(found.tensors) == {name for name, _ in model.named_parameters()}
        elements = sum(p.numel() for p in model.parameters())
        assert build_layout(found.specs, 4).elements == elements

    def test_a_tied_and_an_untied_model_differ(self) -> None:
        tied, untied = gpt2(), gpt2()
        head = untied.get_submodule("lm_head")
        head.weight = nn.Parameter(head.get_parameter("weight").detach().clone())
        one, other = (build_layout(census(m).specs, 2).fingerprint for m in (tied, untied))
        assert one != other

    def test_lora_sends_its_adapters_only(self) -> None:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        found = census(peft.get_peft_model(gpt2(), config))
        assert len(found.specs) == 4
        assert all("lora_" in name for name in names(found))

    def test_one_submodule_and_its_names_are_relative(self) -> None:
        inner = convnet()
        model = Holder(model=inner, teacher=convnet())
        assert census(model, within="model").specs == census(inner).specs
        assert census(Wrapper("module", model), within="model").specs == census(inner).specs
        compiled = Holder(model=torch.compile(inner))
        assert census(compiled, within="model").specs == census(inner).specs
        assert names(census(model, within="model.0")) == ["bias", "weight"]

    def test_an_unknown_submodule_is_answered_with_the_nearest(self) -> None:
        with pytest.raises(LayoutError, match="such as model"):
            census(Holder(model=convnet(), teacher=convnet()), within="modle")
        with pytest.raises(LayoutError, match="such as model, teacher"):
            census(Holder(model=convnet(), teacher=convnet()), within="zzz")
        with pytest.raises(LayoutError, match="it has none"):
            census(nn.Linear(2, 2), within="model")

    def test_a_parameter_without_elements_takes_no_place(self) -> None:
        model = Holder(net=nn.Linear(2, 2), none=nn.Parameter(torch.zeros(0, 4)))
        found = census(model)
        assert "none" in names(found)
        assert build_layout(found.specs, 9).elements == 6


class TestKinds:
    def test_embeddings_are_found_by_type_and_not_by_name(self) -> None:
        model = Holder(
            table=nn.Embedding(5, 2), bag=nn.EmbeddingBag(5, 2), embedding=nn.Linear(2, 2)
        )
        assert kinds(census(model)) == {
            "table.weight": EMBEDDING,
            "bag.weight": EMBEDDING,
            "embedding.weight": WEIGHT,
            "embedding.bias": WEIGHT,
        }

    def test_a_head_tied_to_an_embedding_is_one(self) -> None:
        found = kinds(census(gpt2()))
        assert found.pop("lm_head.weight") == EMBEDDING
        embeddings = {name for name, kind in found.items() if kind == EMBEDDING}
        assert embeddings == {"transformer.wte.weight", "transformer.wpe.weight"}

    def test_a_parametrized_embedding_is_not_computed(self) -> None:
        model = parametrizations.weight_norm(nn.Embedding(5, 2))
        assert set(kinds(census(model)).values()) == {WEIGHT}


class TestBuffers:
    def test_batch_statistics_take_part_and_counters_stay(self) -> None:
        found = kinds(census(convnet()))
        assert found["1.running_mean"] == BUFFER
        assert found["1.running_var"] == BUFFER
        assert "1.num_batches_tracked" not in found

    def test_all_stay_when_told_so(self) -> None:
        assert BUFFER not in kinds(census(convnet(), buffers="local")).values()
        with pytest.raises(ValueError, match="unknown"):
            census(convnet(), buffers="some")

    def test_those_that_are_not_saved_stay(self) -> None:
        model = convnet()
        model.register_buffer("table", torch.ones(3), persistent=False)
        model.register_buffer("scale", torch.ones(3))
        model.register_buffer("nothing", None)
        assert "table" not in kinds(census(model))
        assert kinds(census(model))["scale"] == BUFFER

    def test_those_of_a_frozen_part_stay(self) -> None:
        model = nn.Sequential(convnet().requires_grad_(False), nn.Linear(2, 2))
        assert names(census(model)) == ["1.bias", "1.weight"]

    def test_those_of_a_layer_without_weights_go_with_what_holds_it(self) -> None:
        trained = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))
        assert "1.running_mean" in names(census(trained))
        frozen = nn.Sequential(trained.requires_grad_(False), nn.Linear(2, 2))
        assert names(census(frozen)) == ["1.bias", "1.weight"]

    def test_shared_ones_are_listed_once(self) -> None:
        norm = nn.BatchNorm1d(2)
        found = census(Holder(a=norm, b=norm))
        assert sorted(found.tensors) == ["a.bias", "a.running_mean", "a.running_var", "a.weight"]
        assert {s.name: s.alias_of for s in found.specs}["b.running_var"] == "a.running_var"


def composed() -> torch.Tensor:
    return TwoTensor(torch.ones(2), torch.ones(2))  # type: ignore[no-untyped-call]


class FlatParameter(nn.Parameter):
    """Named like the one of FSDP with use_orig_params=False."""


class TestRefusals:
    @pytest.mark.parametrize(
        ("parameter", "message"),
        [
            (nn.Parameter(torch.ones(2, device="meta")), "p is on the meta device.*materialize"),
            (nn.UninitializedParameter(), "p is not initialized yet.*run one batch"),
            (nn.Parameter(torch.ones(2, dtype=torch.complex64)), "p is complex.*view_as_real"),
            (nn.Parameter(torch.ones(2, 2).to_sparse()), "p is sparse.*to_dense"),
            (nn.Parameter(torch.ones(2).to(torch.float8_e5m2)), "p: dtype 'float8_e5m2'"),
            (
                nn.Parameter(composed()),
                "p is a TwoTensor, not a plain",
            ),
            (FlatParameter(torch.ones(2)), "p is a FlatParameter, not a plain tensor.*whole"),
        ],
    )
    def test_what_has_no_plain_values_is_refused_with_the_fix(
        self, parameter: nn.Parameter, message: str
    ) -> None:
        with pytest.raises(LayoutError, match=message):
            census(Holder(net=nn.Linear(2, 2), p=parameter))

    def test_a_lazy_module_is_refused_and_then_accepted(self) -> None:
        model = nn.Sequential(nn.LazyLinear(3))
        with pytest.raises(LayoutError, match="lazy"):
            census(model)
        model(torch.ones(1, 2))
        assert names(census(model)) == ["0.bias", "0.weight"]

    def test_a_lazy_batch_norm_is_refused(self) -> None:
        with pytest.raises(LayoutError, match="lazy"):
            census(nn.Sequential(nn.LazyBatchNorm1d(), nn.Linear(2, 2)))
