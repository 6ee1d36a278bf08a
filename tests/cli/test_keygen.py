"""What `diloco keygen` makes and says, and which keys a command takes."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from diloco_plugin.cli import main
from diloco_plugin.config import SyncerConfig, resolve
from diloco_plugin.credentials import key_folder, learner_keys, visitor_keys
from diloco_plugin.errors import ConfigError
from diloco_plugin.net.keys import INSECURE, LineKeys, read_door_keys, read_line_keys
from tests.keyring import Keyring

FAR = "tcp://203.0.113.1:5555"
NEAR = "tcp://127.0.0.1:5555"


@pytest.fixture(autouse=True)
def _nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DILOCO_KEYS", "DILOCO_NAME"):
        monkeypatch.setenv(name, "")  # so that what a test leaves there is removed
        monkeypatch.delenv(name)


def test_keygen_makes_what_syncer_and_learner_need_and_says_what_goes_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "keys"
    assert main(["keygen", "--keys", str(folder)]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 2
    assert f"diloco syncer --keys {folder}" in out
    assert "syncer.pub goes to every learner's machine" in out
    assert main(["keygen", "berlin", "--keys", str(folder)]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 2
    assert f"{folder}/berlin.key" in out
    assert f"{folder}/learners.d/berlin.pub" in out
    assert "SIGHUP" in out
    line = read_line_keys(folder, "")
    assert read_door_keys(folder).learners == {line.own.public: "berlin"}


def test_keygen_never_prints_a_secret_and_never_overwrites(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--keys", str(tmp_path)]
    assert [main(["keygen", *flags]), main(["keygen", "berlin", *flags])] == [0, 0]
    before = {path: path.read_bytes() for path in tmp_path.glob("*.*") if path.is_file()}
    assert [main(["keygen", *flags]), main(["keygen", "berlin", *flags])] == [78, 78]
    assert main(["keygen", "syncer", *flags]) == 78
    assert main(["keygen", "../berlin", *flags]) == 78
    assert {path: path.read_bytes() for path in before} == before
    said = "".join(capsys.readouterr())
    assert said.count("never overwritten") == 2
    for path in tmp_path.glob("*.key"):
        assert path.read_text().splitlines()[-1] not in said


def test_keygen_writes_where_it_was_told_else_the_environment_else_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert key_folder(None) == tmp_path / ".config" / "diloco"
    monkeypatch.setenv("DILOCO_KEYS", INSECURE)  # is no folder
    assert key_folder(None) == tmp_path / ".config" / "diloco"
    monkeypatch.setenv("DILOCO_KEYS", "~/keys")
    assert key_folder(None) == tmp_path / "keys"
    assert key_folder("/given") == Path("/given")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--bind", "tcp://0.0.0.0:5555"], "`diloco keygen --keys DIR`"),
        (["--bind", "tcp://0.0.0.0:5555"], "`diloco syncer --bind tcp://0.0.0.0:5555 --keys DIR`"),
        (["--bind", "tcp://0.0.0.0:5555"], "--insecure-plaintext"),
        (["--keys", "x", "--insecure-plaintext"], "exclude each other"),
        (["--keys", "/nowhere/keys", "--bind", "tcp://127.0.0.1:*"], "diloco keygen --keys"),
    ],
)
def test_a_syncer_that_would_be_open_or_has_no_keys_does_not_start(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["syncer", *flags]) == 78
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


def test_keys_come_from_flag_environment_or_file_like_any_key(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('bind = "tcp://0.0.0.0:5555"\nkeys = "from-file"\n')
    assert resolve({}, {}, file).config.keys == "from-file"
    assert resolve({}, {"DILOCO_SYNCER_KEYS": "env"}, file).config.keys == "env"
    assert resolve({"keys": "flag"}, {"DILOCO_SYNCER_KEYS": "env"}, file).config.keys == "flag"
    with pytest.raises(ConfigError, match=r"exclude each other.*DILOCO_SYNCER_INSECURE_PLAINTEXT"):
        resolve({}, {"DILOCO_SYNCER_INSECURE_PLAINTEXT": "1"}, file)
    assert SyncerConfig(bind="ipc:///tmp/x").problem() is None


def test_a_secret_that_others_may_read_stops_syncer_status_and_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ring = Keyring(tmp_path)
    berlin = ring.learner("berlin")
    for folder, name, commands in (
        (ring.syncer, "syncer", (["syncer", "--bind", "tcp://127.0.0.1:*"], ["status", NEAR])),
        (berlin, "berlin", (["status", NEAR], ["check", NEAR])),
    ):
        secret = folder / f"{name}.key"
        secret.chmod(0o640)
        for command in commands:
            assert main([*command, "--keys", str(folder)]) == 78
            assert f"chmod 600 {secret}" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "check"])
def test_no_command_talks_plaintext_to_another_machine_unasked(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, FAR]) == 78
    err = capsys.readouterr().err
    assert "keys='insecure-plaintext'" in err
    assert "`diloco keygen NAME`" in err


def test_a_learner_takes_the_given_keys_else_those_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("diloco").propagate = True
    ring = Keyring(tmp_path)
    berlin, tokyo = ring.learner("berlin"), ring.learner("tokyo")

    def name(keys: str | None, given: str | None = None) -> str:
        found = learner_keys(NEAR, keys, given)
        assert isinstance(found, LineKeys)
        return found.name

    assert learner_keys(FAR, None, "berlin") is None
    assert name(str(berlin)) == "berlin"
    monkeypatch.setenv("DILOCO_KEYS", str(tokyo))
    assert (name(None), name(str(berlin))) == ("tokyo", "berlin")
    monkeypatch.setenv("DILOCO_NAME", "tokyo")
    assert (name(None), name(str(berlin), "berlin")) == ("tokyo", "berlin")
    with pytest.raises(ConfigError, match=r"tokyo\.key"):
        name(str(berlin))
    assert caplog.text == ""


def test_plaintext_to_another_machine_is_warned_about_every_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("diloco").propagate = True
    assert learner_keys(FAR, INSECURE, None) == INSECURE
    monkeypatch.setenv("DILOCO_KEYS", INSECURE)
    assert visitor_keys(FAR, None) == INSECURE
    assert caplog.text.count("neither encrypted nor authenticated") == 2
    assert learner_keys(NEAR, None, None) == INSECURE
    assert caplog.text.count("neither encrypted nor authenticated") == 2
