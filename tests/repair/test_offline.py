"""`diloco repair` on files alone: it says what is wrong, and gives nothing up unasked."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from diloco_plugin.cli import main
from diloco_plugin.store.formats import fragment_path, versions
from diloco_plugin.store.repair import examine
from tests.end_to_end.fleet import Trainee, small_model
from tests.end_to_end.processes import free_ports
from tests.repair.states import (
    RUN,
    finished_run,
    journal,
    model_of,
    newest,
    rot,
    rot_in_the_middle,
    theta,
)
from tests.store.states import content
from tests.syncers import running_syncer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped in order; not to be changed."""
    state = tmp_path_factory.mktemp("run") / "state"
    finished_run(state)
    return state


@pytest.fixture
def state(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "state"))


def repair(state: Path, *flags: str) -> int:
    return main(["repair", "--state", str(state), *flags])


def start(state: Path) -> int:
    return main(["syncer", "--state", str(state), "--bind", "tcp://127.0.0.1:*"])


def test_a_state_without_damage_is_left_alone(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(state)
    for flags in ([], ["--write"], ["--from-learners", "--bind", "tcp://127.0.0.1:*"]):
        assert repair(state, *flags) == 0
        assert capsys.readouterr().out == f"{state}: nothing is damaged.\n"
    assert content(state) == before


def test_looking_says_what_is_wrong_and_what_each_choice_would_do(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    version = versions(state, 0)[-1]
    rot(newest(state, 0))
    before = content(state)
    assert repair(state) == 4
    assert content(state) == before
    out = capsys.readouterr().out
    assert f"v{version:09}.safetensors is damaged" in out
    name = f"version {version} of fragment 0"
    assert f"{name} was announced and is lost (version {version - 1} is intact)." in out
    assert f"diloco repair --state {state} --from-learners --bind ADDRESS" in out
    assert "Learners whose parameters are float32 hold it to the bit" in out
    assert f"diloco repair --state {state} --write --accept-loss\n" in out
    assert f"gives {name} up: fragment 0 goes on from version {version - 1}." in out


def test_a_lost_version_is_given_up_only_by_accept_loss(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    version = versions(state, 0)[-1]
    rotten = rot(newest(state, 0))
    assert start(state) == 4
    assert f"`diloco repair --state {state}`" in capsys.readouterr().err
    before = content(state)
    assert repair(state, "--write") == 4
    err = capsys.readouterr().err
    assert f"announced and lost: version {version} of fragment 0" in err
    assert "--from-learners --bind ADDRESS" in err
    assert "--write --accept-loss" in err
    assert content(state) == before

    older = theta(fragment_path(state, 0, version - 1))
    assert repair(state, "--write", "--accept-loss") == 0
    out = capsys.readouterr().out
    assert f"version {version} is lost; version {version - 1} is used" in out
    assert "Start the syncer as before" in out
    (evidence,) = state.glob("evidence/*/frag-0000-*")
    assert evidence.read_bytes() == rotten
    assert examine(state).problems == []
    with running_syncer(**RUN, config={"state": str(state)}) as syncer:
        assert syncer.status()["fragments"][0]["version"] == version - 1
        assert torch.equal(syncer._merging.the_model.theta[0], older)


def test_a_journal_that_is_damaged_in_the_middle_costs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The syncer refuses, repair goes on from the fragments, and a learner rejoins by itself."""
    state = tmp_path / "state"
    address = f"tcp://127.0.0.1:{free_ports()}"
    with running_syncer(**RUN, bind=address, config={"state": str(state)}) as syncer:
        trainee = Trainee(small_model(), address, "a")
        trainee.wait(lambda: trainee.merged >= 6)
        live = {path: path.read_bytes() for path in state.rglob("*") if path.is_file()}
        before = journal(state)
    model = model_of(syncer)
    # an orderly stop folds the journal: put back the one that a crash would have left
    for path in (state / "manifest").iterdir():
        if path not in live:
            path.unlink()
    for path in (state / "journal").iterdir():
        if path not in live:
            path.unlink()
    rotten = rot_in_the_middle(before)
    files = content(state)
    assert start(state) == 4
    err = capsys.readouterr().err
    assert f"{before.name} is damaged" in err
    assert f"`diloco repair --state {state}`" in err
    assert content(state) == files

    assert repair(state) == 4
    out = capsys.readouterr().out
    assert "The newest version of every fragment is intact." in out
    assert f"diloco repair --state {state} --write\n" in out
    assert repair(state, "--write") == 0
    (evidence,) = state.glob("evidence/*/journal-*")
    assert evidence.read_bytes() == rotten
    with running_syncer(**RUN, bind=address, config={"state": str(state)}) as again, trainee:
        now = model_of(again)
        assert all(torch.equal(now[name], value) for name, value in model.items())
        merges = again.status()["rounds"]["merged"]
        trainee.wait(lambda: again.status()["rounds"]["merged"] >= merges + 4, 40)


def test_without_any_manifest_the_run_goes_on_from_its_fragments(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (state / "manifest").iterdir():
        rot_in_the_middle(path)
    kept = [theta(newest(state, fragment)) for fragment in range(2)]
    held = [versions(state, fragment)[-1] for fragment in range(2)]
    assert start(state) == 4
    assert repair(state, "--write") == 0
    assert "No manifest can be read" in capsys.readouterr().out
    with running_syncer(**RUN, config={"state": str(state)}) as syncer:
        assert [entry["version"] for entry in syncer.status()["fragments"]] == held
        assert syncer.status()["clock"] > 0
        for fragment, value in enumerate(kept):
            assert torch.equal(syncer._merging.the_model.theta[fragment], value)


def test_when_nothing_is_left_of_a_fragment_nothing_can_be_accepted(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for version in versions(state, 1):
        rot(fragment_path(state, 1, version))
    before = content(state)
    assert repair(state) == 4
    out = capsys.readouterr().out
    assert "(no version is intact)" in out
    assert "--from-learners" in out
    assert "--accept-loss" not in out
    assert repair(state, "--write", "--accept-loss") == 4
    assert "--accept-loss" not in capsys.readouterr().err
    assert content(state) == before


def test_without_run_json_and_its_copy_it_says_that_nothing_can_be_done(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rot(state / "run.json")
    rot(state / "epoch.json")
    before = content(state)
    assert repair(state) == 4
    assert "put a copy of either back" in capsys.readouterr().out
    for flags in (["--write"], ["--from-learners", "--bind", "tcp://127.0.0.1:*"]):
        assert repair(state, *flags) == 4
        assert "run.json and its copy in epoch.json are lost" in capsys.readouterr().err
    assert content(state) == before


def test_a_state_in_use_is_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = tmp_path / "state"
    with running_syncer(**RUN, config={"state": str(state)}):
        for flags in ([], ["--write"], ["--from-learners", "--bind", "tcp://127.0.0.1:*"]):
            assert repair(state, *flags) == 75
            assert "in use by process" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "code", "text"),
    [
        (["--accept-loss"], 2, "--accept-loss goes with --write or --from-learners"),
        (["--from-learners"], 2, "--from-learners needs --bind ADDRESS"),
        (["--write", "--from-learners"], 2, "not allowed with"),
        (["--wait", "soon"], 78, "'soon' is not a duration"),
        (["--from-learners", "--bind", "tcp://0.0.0.0:5555"], 78, "without keys"),
        (["--from-learners", "--bind", "nowhere"], 78, "nowhere"),
    ],
)
def test_wrong_flags_are_refused_before_anything_is_done(
    state: Path, capsys: pytest.CaptureFixture[str], flags: list[str], code: int, text: str
) -> None:
    rot(newest(state, 0))
    before = content(state)
    assert repair(state, *flags) == code
    assert text in capsys.readouterr().err
    assert content(state) == before


def test_a_directory_without_a_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert repair(tmp_path / "nothing") == 78
    assert "does not exist" in capsys.readouterr().err
    assert repair(tmp_path) == 78
    assert "holds no run" in capsys.readouterr().err


def test_a_state_in_which_no_run_has_begun_is_said_to_be_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "state"
    with running_syncer(config={"state": str(state)}):
        pass
    assert repair(state) == 78
    assert "no run has begun" in capsys.readouterr().err
