"""What the command `diloco` accepts, prints and returns."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import diloco_plugin.syncer
from diloco_plugin import __version__
from diloco_plugin.cli import main
from diloco_plugin.config import SyncerConfig, resolve
from diloco_plugin.core.parameters import Parameters
from diloco_plugin.errors import AddressInUseError


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[SyncerConfig]:
    """The configurations that `diloco syncer` would have started a daemon with."""
    seen: list[SyncerConfig] = []

    def serve(config: SyncerConfig, given: set[str]) -> int:
        seen.append(config)
        return 0

    monkeypatch.setattr(diloco_plugin.syncer, "serve", serve, raising=False)
    return seen


def test_help_version_and_errors_need_no_torch() -> None:
    program = (
        "import sys; from diloco_plugin.cli import main;"
        "codes = [main(['--help']), main(['syncer', '--help']), main(['version']), main(['bogus']),"
        " main(['syncer', '--quorom', '2'])];"
        "assert codes == [0, 0, 0, 2, 2], codes;"
        "heavy = {'torch', 'numpy', 'zmq', 'msgspec', 'safetensors'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_parameter_has_a_flag_with_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["syncer", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for item in (*fields(Parameters), *fields(SyncerConfig)):
        if item.name != "parameters":
            assert f"--{item.name.replace('_', '-')}" in text
            assert " ".join(item.metadata["help"].split()[:3]) in text
    assert "--no-lockstep" in text


def test_flags_reach_the_daemon_with_their_types(served: list[SyncerConfig]) -> None:
    line = (
        "syncer --bind tcp://127.0.0.1:7777 --run lab --steps 480 --export out/model.safetensors"
        " --publish hf://org/name --every 30m --lockstep --learners 2 --no-outer-nesterov"
        " --sync-every 12 --fragments 4 --outer-lr 1 --codec bf16 --log-format json"
    )
    assert main([*line.split(), "--outer-options", '{"weight_decay": 0.1}']) == 0
    [config] = served
    p = config.parameters
    assert (config.bind, config.run, config.steps) == ("tcp://127.0.0.1:7777", "lab", 480)
    assert (config.every_seconds(), config.log_format) == (1800.0, "json")
    assert (p.lockstep, p.learners, p.outer_nesterov) == (True, 2, False)
    assert (p.sync_every, p.fragments, p.outer_lr, p.codec) == (12, 4, 1.0, "bf16")
    assert p.outer_options == {"weight_decay": 0.1}


def test_the_exit_code_is_that_of_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diloco_plugin.syncer, "serve", lambda config, given: 4, raising=False)
    assert main(["syncer"]) == 4


def test_an_error_on_purpose_is_one_line_and_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def serve(config: SyncerConfig, given: set[str]) -> int:
        raise AddressInUseError("tcp://127.0.0.1:5555 is taken.\nUse another port.")

    monkeypatch.setattr(diloco_plugin.syncer, "serve", serve, raising=False)
    assert main(["syncer"]) == 75
    assert capsys.readouterr().err == ("diloco: tcp://127.0.0.1:5555 is taken. Use another port.\n")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["syncer", "--quorom", "2"], 2, "unknown flag --quorom: did you mean --quorum?"),
        (["syncer", "--sync_every=2"], 2, "unknown flag --sync_every: did you mean --sync-every?"),
        (["syncer", "--zzz"], 2, "unknown flag --zzz: `diloco syncer --help` lists the flags."),
        (["syncer", "stray"], 2, "unexpected argument 'stray'"),
        (["syncer", "--quorum", "many"], 2, "argument --quorum: 'many': expected a whole number"),
        (["syncer", "--quor", "2"], 2, "did you mean --quorum?"),
        (["syncer", "--quorum", "0"], 78, "use at least 1 (quorum is set by flag --quorum)"),
        (["syncer", "--preset", "best"], 2, "argument --preset"),
        (["syncer", "--config", "/nowhere.toml"], 78, "cannot read /nowhere.toml"),
        (["status", "syncer:5555"], 78, "Write tcp://syncer:5555"),
        (["status", "tcp://a:1", "--jsno"], 2, "did you mean --json?"),
        ([], 2, "required: COMMAND"),
    ],
)
def test_wrong_usage_is_one_line_that_says_what_to_do(
    arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    err = capsys.readouterr().err
    assert said in err
    assert err.startswith("diloco: ")
    assert err.count("\n") == 1


def test_the_printed_configuration_is_a_file_that_gives_the_same_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], served: list[SyncerConfig]
) -> None:
    odd = 'quote " backslash \\ newline \n umlaut ü DEL \x7f emoji \N{SNOWMAN}'
    arguments = ["syncer", "--preset", "finetune", "--init", odd, "--outer-lr", "1e-05"]
    arguments += ["--outer-options", '{"dampening": 0.5, "foreach": false}', "--steps", "7"]
    assert main([*arguments, "--print-config"]) == 0
    assert served == []
    file = tmp_path / "run.toml"
    file.write_text(capsys.readouterr().out, encoding="utf-8")
    assert main(arguments) == 0
    assert resolve({}, {}, file).config == served[0]


def test_the_printed_configuration_says_where_each_value_came_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.toml"
    file.write_text("quorum = 2\n")
    monkeypatch.setenv("DILOCO_SYNCER_OVERLAP", "3")
    line = f"syncer --config {file} --preset finetune --steps 9 --print-config"
    assert main(line.split()) == 0
    out = {
        part.split(" = ")[0]: part.split("  # ")[-1] for part in capsys.readouterr().out.split("\n")
    }
    assert out["quorum"] == str(file)
    assert out["overlap"] == "environment variable DILOCO_SYNCER_OVERLAP"
    assert out["steps"] == "flag --steps"
    assert out["outer_lr"] == "preset finetune (flag --preset)"
    assert out["alpha"] == "default"


def test_version_prints_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"diloco-plugin {__version__}\n"


def test_a_reader_that_leaves_early_is_no_error() -> None:
    program = "import sys; from diloco_plugin.cli import main; sys.exit(main(['version']))"
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"},
    )
    assert child.stdout is not None
    child.stdout.close()
    assert child.wait() == 0
    assert child.stderr is not None
    assert child.stderr.read() == b""
    child.stderr.close()
