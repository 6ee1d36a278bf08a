"""Publishing: what arrives at the Hub, and that a bad Hub never holds up a run."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from fake_hub import FakeHub
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from diloco_plugin.errors import ConfigError, UnreachableError
from diloco_plugin.hub import Publisher, download, parse
from diloco_plugin.modelfile import load_init

REPO = "lab/tiny"
TENSORS = {"w": torch.arange(6.0).reshape(2, 3)}
PATIENCE = 60.0


@pytest.fixture
def publisher(hub: FakeHub, tmp_path: Path) -> Iterator[Callable[..., Publisher]]:
    """Makes publishers to the fake Hub with the folder `tmp_path/published`."""
    made: list[Publisher] = []

    def make(every_seconds: float = 0.0) -> Publisher:
        folder = tmp_path / "published"
        made.append(
            Publisher(REPO, folder, every_seconds, endpoint=hub.endpoint, token="hf_secret")
        )
        return made[-1]

    yield make
    hub.gate.set()
    for one in made:
        one.close(PATIENCE)


def tiny() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=64, n_positions=32)
    return GPT2LMHeadModel(config)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("diloco_plugin")
            and r.levelno >= logging.WARNING]  # fmt: skip


@pytest.mark.parametrize("mode", ["regular", "lfs"])
def test_what_was_published_loads_with_from_pretrained_equal_and_tied_again(
    hub: FakeHub, publisher: Callable[..., Publisher], mode: str
) -> None:
    hub.mode = mode
    model = tiny()
    tensors = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert "lm_head.weight" not in tensors
    model.config.architectures = ["GPT2LMHeadModel"]

    one = publisher()
    one.offer("outer step 3", tensors, model.config.to_json_string())
    assert one.close(PATIENCE)

    assert one.published == "outer step 3"
    assert hub.commits == ["outer step 3"]
    assert hub.tokens == {"hf_secret"}
    assert any(request.startswith("PUT /lfs/") for request in hub.requests) == (mode == "lfs")
    loaded = AutoModelForCausalLM.from_pretrained(download(REPO, endpoint=hub.endpoint))
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name


def test_a_run_can_start_from_what_another_published(
    hub: FakeHub, publisher: Callable[..., Publisher]
) -> None:
    one = publisher()
    one.offer("outer step 1", TENSORS)
    assert one.close(PATIENCE)
    for source in (f"hf://{REPO}", f"hf://{REPO}@main", f"hf://{REPO}@{hub.sha(REPO)}"):
        loaded = load_init(source)
        assert loaded.keys() == TENSORS.keys()
        assert torch.equal(loaded["w"], TENSORS["w"])


def test_a_start_downloads_weights_and_configs_only(hub: FakeHub) -> None:
    hub.repos[REPO] = {"a.safetensors": b"x", "config.json": b"{}", "pytorch_model.bin": b"\x80",
                       "run.py": b"", "fp16/b.safetensors": b"y"}  # fmt: skip
    folder = download(REPO, endpoint=hub.endpoint)
    assert sorted(path.name for path in folder.iterdir()) == ["a.safetensors", "config.json"]


def test_a_repository_or_revision_that_is_not_there_is_named(hub: FakeHub) -> None:
    hub.repos[REPO] = {"config.json": b"{}"}
    with pytest.raises(ConfigError, match="no repository lab/other"):
        download("lab/other", endpoint=hub.endpoint)
    with pytest.raises(ConfigError, match="no revision v9"):
        download(REPO, "v9", endpoint=hub.endpoint)


def test_a_hub_that_is_down_at_the_start_is_unreachable(hub: FakeHub) -> None:
    hub.close()
    with pytest.raises(UnreachableError, match=r"give --init a local folder"):
        download(REPO, endpoint=hub.endpoint)


def test_with_the_hub_down_offer_returns_at_once_and_the_folder_is_there(
    hub: FakeHub,
    publisher: Callable[..., Publisher],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hub.close()
    one = publisher()
    one.offer("outer step 1", TENSORS)
    assert one.close(PATIENCE)
    assert one.published == ""
    assert torch.equal(load_init(str(tmp_path / "published"))["w"], TENSORS["w"])
    [warning] = warnings(caplog)
    assert "publishing 'outer step 1' to lab/tiny failed" in warning
    assert "hf_secret" not in caplog.text


def test_a_slow_hub_holds_up_neither_offers_nor_the_end_and_the_newest_wins(
    hub: FakeHub, publisher: Callable[..., Publisher], caplog: pytest.LogCaptureFixture
) -> None:
    hub.gate.clear()
    one = publisher()
    one.offer("outer step 1", TENSORS)
    assert hub.reached.wait(PATIENCE)  # the first one is on its way, and stuck
    for step in (2, 3, 4):
        one.offer(f"outer step {step}", TENSORS)
    assert not one.close(0.0)
    assert "hf upload lab/tiny" in warnings(caplog)[-1]
    hub.gate.set()
    assert one.close(PATIENCE)
    assert hub.commits == ["outer step 1", "outer step 4"]


def test_after_a_failure_the_next_snapshot_is_tried_again(
    hub: FakeHub, publisher: Callable[..., Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = publisher()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    failed = _when_logged("failed")
    one.offer("outer step 1", TENSORS)
    assert failed.wait(PATIENCE)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    one.offer("outer step 2", TENSORS)
    assert one.close(PATIENCE)
    assert hub.commits == ["outer step 2"]


def test_a_disk_that_takes_nothing_is_a_warning_and_nothing_is_uploaded(
    hub: FakeHub,
    publisher: Callable[..., Publisher],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "published").write_text("a file where the folder should be")
    (tmp_path / ".published.old").write_text("and another one in the way")
    one = publisher()
    one.offer("outer step 1", {"w": torch.zeros(2).to_sparse()})
    assert one.close(PATIENCE)
    assert "cannot write" in warnings(caplog)[0]
    assert hub.requests == []


def test_nothing_can_be_offered_to_a_closed_publisher(publisher: Callable[..., Publisher]) -> None:
    one = publisher()
    assert one.close(PATIENCE)
    with pytest.raises(RuntimeError, match="closed"):
        one.offer("outer step 1", TENSORS)


def test_a_snapshot_is_due_once_per_period(publisher: Callable[..., Publisher]) -> None:
    one = publisher(every_seconds=10.0)
    assert [one.due(now) for now in (100.0, 109.9, 110.0, 110.1, 119.9, 150.0, 150.1)] == [
        False, False, True, False, False, True, False,
    ]  # fmt: skip
    assert not publisher(every_seconds=0.0).due(1e9)


def test_an_adapter_is_published_as_peft_saves_it(
    hub: FakeHub, publisher: Callable[..., Publisher], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    model = peft.get_peft_model(tiny(), peft.LoraConfig(target_modules=["c_attn"], r=2))
    trained = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    for tensor in trained.values():
        tensor.normal_()
    model.peft_config["default"].save_pretrained(tmp_path / "config")
    config = (tmp_path / "config" / "adapter_config.json").read_text()

    one = publisher()
    one.offer("outer step 1", trained, config)
    assert one.close(PATIENCE)

    assert set(hub.repos[REPO]) == {"adapter_model.safetensors", "adapter_config.json"}
    loaded = peft.PeftModel.from_pretrained(tiny(), tmp_path / "published")
    found = dict(loaded.named_parameters())
    assert all(torch.equal(found[name], tensor) for name, tensor in trained.items())
    # ... and it is a model to start from, under the names of a model's parameters.
    again = load_init(f"hf://{REPO}")
    assert again.keys() == trained.keys()


def test_offline_mode_costs_a_warning_only(hub: FakeHub, tmp_path: Path) -> None:
    program = (
        "import sys, torch; from diloco_plugin.hub import Publisher;"
        f"p = Publisher({REPO!r}, {str(tmp_path / 'out')!r}, 0.0, endpoint={hub.endpoint!r});"
        "p.offer('outer step 1', {'w': torch.ones(2)});"
        "sys.exit(0 if p.close(60.0) and not p.published else 1)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"HF_HUB_OFFLINE": "1", "PATH": "", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "OfflineModeIsEnabled" in done.stderr
    assert hub.requests == []
    assert load_file(tmp_path / "out" / "model.safetensors")["w"].tolist() == [1.0, 1.0]


def test_without_huggingface_hub_the_message_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"pip install 'diloco-plugin\[hub\]'"):
        download(REPO)
    with pytest.raises(ConfigError, match=r"pip install 'diloco-plugin\[hub\]'"):
        Publisher(REPO, "out", 0.0)


def test_addresses_of_the_hub_are_taken_apart_or_refused() -> None:
    assert parse("hf://org/name") == ("org/name", None)
    assert parse("hf://gpt2") == ("gpt2", None)
    assert parse("hf://org/na.me-1@refs/pr/2") == ("org/na.me-1", "refs/pr/2")
    for wrong in ("org/name", "hf://", "hf://a/b/c", "hf://a/b@", "hf://a b", "https://hf.co/a/b"):
        with pytest.raises(ConfigError, match="hf://org/name"):
            parse(wrong)


def _when_logged(word: str) -> threading.Event:
    """An event that is set when the Hub's log says this word."""
    seen = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if word in record.getMessage():
                seen.set()
                logging.getLogger("diloco_plugin.hub").removeHandler(self)

    logging.getLogger("diloco_plugin.hub").addHandler(Listener())
    return seen


def test_the_config_that_is_published_is_the_learners_to_the_byte(
    hub: FakeHub, publisher: Callable[..., Publisher]
) -> None:
    config = json.dumps({"model_type": "gpt2", "odd": "ü"}, indent=3)
    one = publisher()
    one.offer("outer step 1", TENSORS, config)
    assert one.close(PATIENCE)
    assert hub.repos[REPO]["config.json"].decode() == config
