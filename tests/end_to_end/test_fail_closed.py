"""A door that would admit strangers serves nobody, and plaintext is never silent."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import diloco_plugin
from diloco_plugin.config import SyncerConfig, parameters_from
from diloco_plugin.errors import ConfigError, InvariantError
from diloco_plugin.net.address import Address
from diloco_plugin.net.guard import Guard
from diloco_plugin.net.keys import fingerprint, new_pair
from diloco_plugin.net.options import new_context
from diloco_plugin.status import fetch
from diloco_plugin.syncer import Syncer
from diloco_plugin.syncer import security as syncer_security
from diloco_plugin.syncer.security import Security
from tests.end_to_end.fleet import Trainee, sgd, small_model
from tests.end_to_end.processes import Daemon, here
from tests.keyring import Keyring, line_to
from tests.syncers import running_syncer
from tests.waiting import until

FLAGS = ("--sync-every", "4", "--fragments", "2", "--overlap", "1")


@pytest.fixture
def ring(tmp_path: Path) -> Keyring:
    ring = Keyring(tmp_path)
    ring.learner("alpha")
    return ring


# ---- it never fails open ----


def test_the_syncer_ends_when_its_guard_dies(
    ring: Keyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(request: list[bytes]) -> list[bytes]:
        raise RuntimeError("a bug in the guard")

    def one_more_handshake() -> None:
        with running_syncer(config={"keys": str(ring.syncer)}) as syncer:
            monkeypatch.setattr(syncer._security.guard, "_answer", fail)
            with line_to(syncer.address, ring.line("alpha")):
                until(lambda: syncer._context.closed)

    with pytest.raises(RuntimeError, match="a bug in the guard"):
        one_more_handshake()


@pytest.mark.parametrize(
    ("fault", "says"),
    [("admits everybody", "was let in"), ("answers nothing", "did not refuse a key")],
)
def test_a_syncer_whose_doors_do_not_refuse_a_stranger_serves_nobody(
    ring: Keyring, monkeypatch: pytest.MonkeyPatch, fault: str, says: str
) -> None:
    if fault == "admits everybody":
        monkeypatch.setattr(Guard, "name_of", lambda self, key: "anybody")
    else:
        monkeypatch.setattr(Guard, "_run", lambda self: None)
        monkeypatch.setattr(syncer_security, "PROBE_SECONDS", 0.3)
    config = SyncerConfig(
        bind="tcp://127.0.0.1:*", keys=str(ring.syncer), parameters=parameters_from({})
    )
    with pytest.raises(InvariantError, match=says) as caught:
        Syncer(config)
    assert caught.value.exit_code == 70
    assert "Nobody was served" in str(caught.value)


# ---- the only way round ----


def test_insecure_plaintext_works_and_is_never_silent(caplog: pytest.LogCaptureFixture) -> None:
    host = here()
    logging.getLogger("diloco").propagate = True
    with Daemon(*FLAGS, "--insecure-plaintext", bind="tcp://0.0.0.0:*") as daemon:
        until(lambda: "neither encrypted nor authenticated" in daemon.err)
        address = f"tcp://{host}:{Address.parse(daemon.address).port}"
        with Trainee(small_model(0), address, "a", keys="insecure-plaintext") as learner:
            learner.wait(lambda: learner.merged > 2)
        body = fetch(address, keys="insecure-plaintext")
        assert body["security"] == "insecure-plaintext"
        assert "neither encrypted nor authenticated" in body["problems"][0]
        if host != "127.0.0.1":
            assert "whoever is on the way can read and change the model" in caplog.text
            with pytest.raises(ConfigError, match="keys='insecure-plaintext'"):
                diloco_plugin.attach(small_model(0), sgd(small_model(0)), address)


def test_insecure_plaintext_is_said_again_every_ten_minutes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logging.getLogger("diloco").propagate = True
    context = new_context()
    security = Security(SyncerConfig(insecure_plaintext=True), context, lambda error: None)
    context.destroy()
    for now in (1000.0, 1001.0, 1599.0, 1600.5, 1700.0, 2201.0):
        security.mind(now)
    assert caplog.text.count("neither encrypted nor authenticated") == 3


def test_refused_keys_are_logged_once_a_minute_at_most(
    ring: Keyring, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("diloco").propagate = True
    context = new_context()
    security = Security(SyncerConfig(keys=str(ring.syncer)), context, lambda error: None)
    try:
        assert isinstance(security.guard, Guard)
        for second in range(1000, 1130):
            security.guard._note(fingerprint(new_pair().public), "10.0.0.7")
            security.mind(float(second))
        assert caplog.text.count("refused for keys that are not on the list") == 3
        assert "60 connections refused for keys that are not on the list" in caplog.text
    finally:
        security.close()
        context.destroy(linger=0)
