"""Model files: what can be started from, and what a write promises."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from diloco_plugin.errors import ConfigError
from diloco_plugin.modelfile import adapter_tensors, load_init, write_folder, write_model

TENSORS = {"a": torch.arange(4.0), "b": torch.ones(2, 2), "c": torch.zeros(())}
CONFIG = '{"model_type": "gpt2"}'


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


def refusal(source: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_init(str(source))
    return str(caught.value)


def test_what_was_written_can_be_started_from(tmp_path: Path) -> None:
    write_model(tmp_path / "deep" / "m.safetensors", TENSORS, {"run": "main"})
    assert same(load_init(str(tmp_path / "deep" / "m.safetensors")), TENSORS)
    assert same(load_init(str(tmp_path / "deep")), TENSORS)
    with safe_open(tmp_path / "deep" / "m.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "run": "main"}


def test_views_of_one_flat_buffer_are_written_as_the_tensors_they_are(tmp_path: Path) -> None:
    flat = torch.arange(12.0)
    views = {"x": flat[:4].view(2, 2), "y": flat[4:10], "z": flat[10:].view(1, 2)}
    write_model(tmp_path / "m.safetensors", views)
    assert same(load_file(tmp_path / "m.safetensors"), views)
    write_folder(tmp_path / "folder", views, shard_bytes_max=16)
    assert same(load_init(str(tmp_path / "folder")), views)


def test_a_large_model_is_split_into_shards_with_an_index(tmp_path: Path) -> None:
    write_folder(tmp_path / "m", TENSORS, CONFIG, shard_bytes_max=20)
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 36
    assert set(index["weight_map"].values()) == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }
    assert same(load_init(str(tmp_path / "m")), TENSORS)


def test_a_folder_replaces_the_older_one_whole_and_leaves_nothing_behind(tmp_path: Path) -> None:
    write_folder(tmp_path / "m", TENSORS, CONFIG, shard_bytes_max=20)
    write_folder(tmp_path / "m", {"n": torch.ones(1)})
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["model.safetensors"]


def test_a_write_that_fails_leaves_the_older_file_and_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.safetensors"
    write_model(path, TENSORS)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_model(path, {"new": torch.ones(1)})
    assert same(load_file(path), TENSORS)
    assert list(tmp_path.iterdir()) == [path]


def test_a_disk_that_safetensors_finds_full_is_an_oserror(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("IoError: No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        write_model(tmp_path / "m.safetensors", TENSORS)
    assert list(tmp_path.iterdir()) == []


def test_the_config_lands_where_from_pretrained_looks_or_beside_the_file(tmp_path: Path) -> None:
    write_model(tmp_path / "model.safetensors", TENSORS, config_json=CONFIG)
    write_model(tmp_path / "other.safetensors", TENSORS, config_json=CONFIG)
    assert (tmp_path / "config.json").read_text() == CONFIG
    assert (tmp_path / "other.config.json").read_text() == CONFIG


def test_somebody_elses_config_json_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"editor": "mine"}')
    write_model(tmp_path / "model.safetensors", TENSORS, config_json=CONFIG)
    assert (tmp_path / "config.json").read_text() == '{"editor": "mine"}'
    assert (tmp_path / "model.config.json").read_text() == CONFIG


@pytest.mark.parametrize("config", ["not json", "[1]", '"text"'])
def test_a_config_that_is_none_costs_a_warning_not_the_model(
    tmp_path: Path, config: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path / "model.safetensors", TENSORS, config_json=config)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert "not a JSON object" in caplog.text


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (b"PK\x03\x04data.pkl", "a pickled PyTorch checkpoint (which is never unpickled here)"),
        (b"\x80\x02}q\x00.", "a pickled PyTorch checkpoint"),
        (b"GGUF\x03\x00\x00\x00", "a GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
        (b"", "empty"),
        (b"hello world, this is text", "something else"),
    ],
)
def test_a_file_that_is_not_safetensors_is_refused_and_said_what_it_is(
    tmp_path: Path, head: bytes, said: str
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(head)
    text = refusal(path)
    assert said in text
    assert "not a safetensors file" in text


def test_a_start_that_is_not_there_is_named_with_what_was_found(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "nowhere")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    assert "but pytorch_model.bin" in refusal(tmp_path)


def test_an_index_cannot_reach_outside_its_folder(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "secret.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "../secret.safetensors"}}))
    assert "names '../secret.safetensors', which is not in" in refusal(folder)


def test_an_incomplete_or_broken_index_is_refused(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    save_file({"w": torch.ones(1)}, tmp_path / "s.safetensors")
    index.write_text(json.dumps({"weight_map": {"w": "s.safetensors", "v": "s.safetensors"}}))
    assert "1 tensors of" in refusal(tmp_path)
    index.write_text("{}")
    assert "not an index of shards" in refusal(tmp_path)


def test_a_file_without_tensors_is_refused(tmp_path: Path) -> None:
    save_file({}, tmp_path / "m.safetensors")
    assert "holds no tensors" in refusal(tmp_path / "m.safetensors")


def test_the_names_of_an_adapter_come_without_the_adapters_name() -> None:
    one = torch.ones(1)
    names = {
        "m.q.lora_A.default.weight": "m.q.lora_A.weight",
        "m.e.lora_embedding_B.default": "m.e.lora_embedding_B",
        "m.q.lora_magnitude_vector.default.weight": "m.q.lora_magnitude_vector.weight",
        "m.head.modules_to_save.default.weight": "m.head.weight",
    }
    assert list(adapter_tensors(dict.fromkeys(names, one))) == list(names.values())
    assert list(adapter_tensors({"m.q.lora_B.mine.weight": one})) == ["m.q.lora_B.weight"]


def test_a_model_file_is_as_readable_as_any_other_file(tmp_path: Path) -> None:
    write_model(tmp_path / "model.safetensors", {"w": torch.zeros(2)})
    plain = tmp_path / "plain"
    plain.touch()
    assert (tmp_path / "model.safetensors").stat().st_mode == plain.stat().st_mode
