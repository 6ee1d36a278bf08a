"""Where a value comes from, and what is said about a wrong one."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from diloco_plugin.config import (
    KINDS,
    advice,
    default_address,
    duration,
    load_toml,
    parameters_from,
    parameters_to,
    resolve,
)
from diloco_plugin.core.parameters import PRESETS, Parameters
from diloco_plugin.errors import ConfigError


def toml(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def refusal(**mapping: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parameters_from(mapping, source="run.toml")
    return str(caught.value)


def test_an_unknown_key_is_named_with_its_source_and_the_nearest_key() -> None:
    assert refusal(quorom=2) == "unknown key 'quorom' in run.toml: did you mean 'quorum'?"
    assert "did you mean 'sync_every'?" in refusal(**{"sync-every": 2})
    assert "--help" in refusal(zzz=1)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("quorum", True, "a whole number"),
        ("quorum", 1.0, "a whole number"),
        ("quorum", "1", "a whole number"),
        ("grace", "0.8", "a number"),
        ("grace", True, "a number"),
        ("lockstep", 1, "true or false"),
        ("merge", 3, "text"),
        ("outer_options", [1], "a table"),
    ],
)
def test_a_wrong_type_is_refused_with_value_source_and_what_is_expected(
    key: str, value: object, expected: str
) -> None:
    text = refusal(**{key: value})
    assert text.startswith(f"{key}={value!r} in run.toml")
    assert f"expected {expected}" in text


def test_a_whole_number_may_stand_for_a_float() -> None:
    assert parameters_from({"outer_lr": 1}).outer_lr == 1.0
    assert type(parameters_from({"outer_lr": 1}).outer_lr) is float


def test_a_value_out_of_range_says_where_it_was_set() -> None:
    assert refusal(quorum=0).endswith("use at least 1 (quorum is set by run.toml).")
    assert "fragments=30 is more than sync_every=24" in refusal(fragments=30)


def test_nan_is_no_value() -> None:
    for key in ("outer_lr", "outer_momentum", "grace", "alpha", "lease"):
        assert key in refusal(**{key: float("nan")})


def test_an_outer_optimizer_that_torch_does_not_have_is_refused_at_once() -> None:
    assert "SDG" in refusal(outer_optimizer="SDG")
    assert "no_such_option" in refusal(outer_options={"no_such_option": 1})


@pytest.mark.parametrize("preset", list(PRESETS))
def test_parameters_survive_the_way_to_the_learner(preset: str) -> None:
    sent = parameters_from({"learners": 2, "outer_options": {"dampening": 0.0}}, preset)
    assert parameters_from(parameters_to(sent)) == sent


def test_what_is_given_beats_the_preset_and_the_preset_beats_the_default() -> None:
    found = parameters_from({"outer_lr": 0.9}, preset="finetune")
    assert (found.outer_lr, found.outer_momentum, found.quorum) == (0.9, 0.0, 1)


def test_an_unknown_preset_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'finetune'"):
        parameters_from({}, preset="finetunes")


def test_flag_beats_environment_beats_file_beats_preset_beats_default(tmp_path: Path) -> None:
    file = toml(tmp_path, 'preset = "finetune"\nquorum = 2\nsync_every = 30\nouter_lr = 0.8\n')
    environ = {"DILOCO_SYNCER_SYNC_EVERY": "31", "DILOCO_SYNCER_OUTER_LR": "0.9"}
    found = resolve({"outer_lr": 0.6}, environ, file)
    p = found.config.parameters
    assert (p.outer_lr, p.sync_every, p.quorum, p.outer_momentum, p.overlap) == (0.6, 31, 2, 0.0, 2)
    assert found.sources["outer_lr"] == "flag --outer-lr"
    assert found.sources["sync_every"] == "environment variable DILOCO_SYNCER_SYNC_EVERY"
    assert found.sources["quorum"] == str(file)
    assert found.sources["outer_momentum"] == f"preset finetune ({file})"
    assert found.sources["overlap"] == "default"


def test_every_key_can_be_set_in_the_environment() -> None:
    texts = {"int": "3", "float": "0.5", "bool": "true", "dict[str, Any]": '{"dampening": 0.0}'}
    texts_by_key = {
        "bind": "tcp://127.0.0.1:1", "every": "5m", "publish": "hf://a/b",
        "export": "a.safetensors", "sync_every": "25", "log_level": "debug",
        "log_format": "json", "merge": "direct", "codec": "bf16",
        "buffers": "local", "outer_optimizer": "SGD", "overlap": "1",
        "durability": "none", "interval": "5m",
    }  # fmt: skip
    for key, kind in KINDS.items():
        environ = {f"DILOCO_SYNCER_{key.upper()}": texts_by_key.get(key, texts.get(kind, "x"))}
        flags = {"learners": 2} if key == "lockstep" else {}
        flags |= {"publish": "hf://a/b"} if key == "every" else {}
        flags |= {"state": "here"} if key == "durability" else {}
        if key == "outer_nesterov":
            environ["DILOCO_SYNCER_OUTER_NESTEROV"] = "no"
        found = resolve(flags, environ)
        assert found.sources[key].startswith("environment variable"), key


def test_a_misspelled_environment_variable_is_an_error_and_one_of_kubernetes_is_not() -> None:
    with pytest.raises(ConfigError, match="did you mean DILOCO_SYNCER_QUORUM"):
        resolve({}, {"DILOCO_SYNCER_QUORM": "2"})
    resolve({}, {"DILOCO_SYNCER_SERVICE_HOST": "10.0.0.1", "DILOCO_SYNCER_PORT": "x",
                 "DILOCO_SYNCER_PORT_5555_TCP": "x", "DILOCO_SYNCER": "tcp://a:1"})  # fmt: skip


def test_a_wrong_environment_variable_is_named() -> None:
    with pytest.raises(
        ConfigError, match="quorum='many' in environment variable DILOCO_SYNCER_QUO"
    ):
        resolve({}, {"DILOCO_SYNCER_QUORUM": "many"})


def test_a_file_may_hold_every_key_and_one_table(tmp_path: Path) -> None:
    text = 'run = "a"\nsteps = 100\npreset = "finetune"\n[outer_options]\nweight_decay = 0.1\n'
    assert load_toml(toml(tmp_path, text)) == {
        "run": "a",
        "steps": 100,
        "preset": "finetune",
        "outer_options": {"weight_decay": 0.1},
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("quorom = 2", "unknown key 'quorom' in .*run.toml: did you mean 'quorum'"),
        ("steps = ", "is not TOML"),
        ("steps = " + "[" * 10_000, "is nested too deep"),
        ("steps = true", "steps=True in .*run.toml is of type bool: expected a whole number"),
        ("[syncer]\nsteps = 1", "unknown key 'syncer'"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_toml(toml(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*run\.toml: No such file"):
        load_toml(tmp_path / "run.toml")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"bind": "0.0.0.0:5555"}, "Write tcp://0.0.0.0:5555"),
        ({"bind": "tcp://0.0.0.0"}, "has no port"),
        ({"bind": "tcp://0.0.0.0:99999"}, "no valid port"),
        ({"steps": -1}, "steps=-1 is negative"),
        ({"run": ""}, "1 to 128 letters"),
        ({"run": "a/b"}, "1 to 128 letters"),
        ({"export": "model.bin"}, r"must end in \.safetensors"),
        ({"publish": "org/name"}, "use 'hf://org/name'"),
        ({"publish": "hf://org/name@main"}, "use 'hf://org/name'"),
        ({"every": "30m"}, "nothing to publish to"),
        ({"every": "soon", "publish": "hf://a/b"}, "every='soon' is not a duration"),
        ({"log_level": "loud"}, "use one of debug, info"),
    ],
)
def test_a_wrong_daemon_setting_is_refused_with_the_fix(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve(flags, {})


def test_durations_are_written_as_people_write_them() -> None:
    texts = ("", "0", "90", "90s", "30m", "1.5h", "2d", " 5 M ")
    assert [duration(text) for text in texts] == [0, 0, 90, 90, 1800, 5400, 172800, 300]


def momentum_advice(momentum: float, rounds: int, **other: Any) -> list[str]:
    flags = {"outer_momentum": momentum, "steps": 24 * rounds + 5, "export": "m.safetensors"}
    return [s for s in advice(resolve(flags | other, {}).config) if "outer_momentum" in s]


@pytest.mark.parametrize(
    ("momentum", "rounds", "warned"),
    [
        (0.9, 16, True), (0.9, 62, True), (0.9, 99, True), (0.9, 100, False),
        (0.5, 16, True), (0.5, 20, False), (0.5, 62, False), (0.0, 1, False), (0.0, 16, False),
    ],
)  # fmt: skip
def test_momentum_is_warned_about_where_it_was_measured_to_hurt(
    momentum: float, rounds: int, warned: bool
) -> None:
    assert bool(momentum_advice(momentum, rounds)) is warned


def test_the_advice_on_momentum_names_the_values_and_the_fix() -> None:
    [few] = momentum_advice(0.9, 16)
    assert "outer_momentum=0.9" in few
    assert "outer_lr=0.7 to an effective 7" in few
    assert "steps=389 with sync_every=24" in few
    assert "only 16 rounds" in few
    assert "`--outer-momentum 0 --outer-lr 1.0` (that is `--preset finetune`)" in few
    assert "--outer-momentum 0.5" not in few
    [more] = momentum_advice(0.9, 62)
    assert "use `--outer-momentum 0.5`, or `--outer-momentum 0 --outer-lr 1.0`" in more


def test_the_fixes_that_the_advice_gives_silence_it() -> None:
    assert not momentum_advice(0.0, 16, outer_lr=1.0)
    flags = {"preset": "finetune", "steps": 400, "export": "m.safetensors"}
    assert advice(resolve(flags, {}).config) == []


def test_nothing_is_said_about_a_run_without_end_that_is_exported() -> None:
    assert advice(resolve({"export": "m.safetensors"}, {}).config) == []


def test_a_wrong_address_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_SYNCER", "syncer")
    with pytest.raises(ConfigError, match="environment variable DILOCO_SYNCER"):
        default_address()


def test_a_lost_model_a_short_run_and_lockstep_are_warned_about() -> None:
    said = " ".join(advice(resolve({"lockstep": True, "learners": 2, "steps": 9}, {}).config))
    assert "steps=9 is less than sync_every=24" in said
    assert "--export" in said
    assert "all 2 learners wait" in said


def test_the_address_is_the_given_one_else_that_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DILOCO_SYNCER", "tcp://env:5555")
    assert default_address("tcp://given:5555") == "tcp://given:5555"
    assert default_address() == default_address("") == "tcp://env:5555"


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("", "set DILOCO_SYNCER"),
        ("syncer:5555", "Write tcp://syncer:5555"),
        ("http://syncer:5555", "must begin with tcp:// or ipc://"),
        ("tcp://syncer", "has no port"),
    ],
)
def test_a_wrong_address_is_refused_with_the_fix(
    monkeypatch: pytest.MonkeyPatch, address: str, said: str
) -> None:
    monkeypatch.delenv("DILOCO_SYNCER", raising=False)
    with pytest.raises(ConfigError) as caught:
        default_address(address)
    assert said in str(caught.value)


def test_every_parameter_has_a_sentence_of_help() -> None:
    assert all(f.metadata["help"] for f in fields(Parameters))
