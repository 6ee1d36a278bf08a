"""A port that strangers can reach: who comes in, as whom, and what those are told who do not."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import zmq
from safetensors.torch import save_file

import diloco_plugin
from diloco_plugin.credentials import visitor_keys
from diloco_plugin.describing import describe
from diloco_plugin.errors import (
    ConfigError,
    RefusedError,
)
from diloco_plugin.net.address import Address
from diloco_plugin.net.keys import LineKeys, fingerprint
from diloco_plugin.net.options import new_context, new_dealer
from diloco_plugin.status import check, fetch
from diloco_plugin.syncer import Syncer
from diloco_plugin.wire import messages as msg
from diloco_plugin.wire.framing import decode_to_learner, encode
from tests.end_to_end.fleet import Trainee, sgd, small_model
from tests.end_to_end.forged import Forged, many_weights, one_weight
from tests.end_to_end.processes import Daemon, here
from tests.keyring import Keyring, line_to
from tests.syncers import running_syncer
from tests.waiting import until

SPECS = one_weight(1000)
FLAGS = ("--sync-every", "4", "--fragments", "2", "--overlap", "1")


@pytest.fixture(autouse=True)
def _nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DILOCO_KEYS", "DILOCO_NAME", "DILOCO_SYNCER"):
        monkeypatch.setenv(name, "")  # so that what a test leaves there is removed
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Keyring:
    ring = Keyring(tmp_path_factory.mktemp("keys"))
    for name in ("alpha", "beta"):
        ring.learner(name)
    ring.learner("mallory", admitted=False)
    return ring


@pytest.fixture(scope="module")
def syncer(ring: Keyring, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Syncer]:
    """A run that was given its model, behind keys."""
    folder: Path = tmp_path_factory.mktemp("init")
    save_file({"w": torch.zeros(1000)}, folder / "model.safetensors")
    with running_syncer(
        sync_every=1,
        fragments=1,
        overlap=0,
        config={"init": str(folder), "keys": str(ring.syncer)},
    ) as running:
        yield running


def folder(ring: Keyring, name: str) -> str:
    return str(ring.syncer.parent / name)


def attach(address: str, keys: str | None, **options: object) -> diloco_plugin.Learner:
    model = small_model(0)
    return diloco_plugin.attach(
        model, sgd(model), address, keys=keys, **({"connect_timeout": 1.5} | options)
    )


# ---- those who may ----


@pytest.mark.parametrize("host", [here(), "127.0.0.1", "127.0.0.2"])
def test_two_learners_train_and_merge_encrypted_at_any_address(ring: Keyring, host: str) -> None:
    keys = {"keys": str(ring.syncer)}
    with running_syncer(
        sync_every=4, fragments=2, overlap=1, quorum=2, bind="tcp://0.0.0.0:*", config=keys
    ) as syncer:
        address = f"tcp://{host}:{Address.parse(syncer.address).port}"
        with (
            Trainee(small_model(0), address, "alpha", keys=folder(ring, "alpha")) as a,
            Trainee(small_model(1), address, "beta", keys=folder(ring, "beta"), data=1) as b,
        ):
            a.wait(lambda: min(a.merged, b.merged) > 3)
            body = fetch(address, keys=visitor_keys(address, str(ring.syncer)))
            assert [learner["name"] for learner in body["learners"]] == ["alpha", "beta"]
            assert body["security"] == "keys"
            assert body["admitted"] == ["alpha", "beta"]
        assert syncer.status()["fates"]["rejected"] == {}
        assert syncer.status()["strange_messages"] == {}
        assert syncer.status()["refused_keys"] == []


def test_a_fixed_port_has_its_bulk_port_beside_it_on_all_addresses(ring: Keyring) -> None:
    with running_syncer(bind="tcp://*:*", config={"keys": str(ring.syncer)}) as syncer:
        port = Address.parse(syncer.address).port
    assert Address.parse(f"tcp://*:{port}").beside() == Address("tcp", "*", port + 1)


def test_the_only_key_in_the_folder_gives_the_learner_its_name(
    ring: Keyring, syncer: Syncer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DILOCO_KEYS", folder(ring, "alpha"))
    with pytest.raises(RefusedError, match="does not fit"):
        attach(syncer.address, None)
    assert os.environ["DILOCO_NAME"] == "alpha"  # for shard() and child processes
    monkeypatch.setenv("DILOCO_NAME", "beta")
    with pytest.raises(ConfigError, match=r"beta\.key.*there are alpha\.key"):
        attach(syncer.address, None)


def test_the_operator_may_look_but_not_train(ring: Keyring, syncer: Syncer) -> None:
    own = visitor_keys(syncer.address, str(ring.syncer))
    assert isinstance(own, LineKeys)
    assert fetch(syncer.address, keys=own)["run"] == "main"
    with pytest.raises(ConfigError, match="holds no learner's key"):
        check(syncer.address, str(ring.syncer))
    assert check(syncer.address, folder(ring, "alpha"))
    with Forged(syncer.address, "syncer", SPECS, keys=own) as operator:
        operator.hello()
        refusal = operator.hear(msg.Refuse)
        assert (refusal.code, "for looking only" in refusal.text) == ("identity", True)


# ---- those who may not ----


def test_an_unknown_key_is_refused_told_why_and_seen_in_the_status(
    ring: Keyring, syncer: Syncer
) -> None:
    stranger = ring.line("mallory")
    with pytest.raises(RefusedError) as caught:
        attach(syncer.address, folder(ring, "mallory"))
    assert caught.value.exit_code == 77
    text = str(caught.value)
    assert f"key {fingerprint(stranger.own.public)} of 'mallory'" in text
    assert fingerprint(stranger.syncer) in text
    assert text.index("mallory.pub is not in the syncer's learners.d") < text.index(
        "syncer.pub here is another syncer's"
    )
    body = syncer.status()
    seen = [r for r in body["refused_keys"] if r["fingerprint"] == fingerprint(stranger.own.public)]
    assert seen[0]["count"] >= 1
    assert seen[0]["address"] == "127.0.0.1"
    assert any(seen[0]["fingerprint"] in problem for problem in body["problems"])
    assert not body["learners"]
    with pytest.raises(RefusedError, match=re.escape(text)):
        check(syncer.address, folder(ring, "mallory"), 0.5)


def test_check_finds_a_key_that_was_given_another_name(
    ring: Keyring, syncer: Syncer, tmp_path: Path
) -> None:
    shutil.copy(Path(folder(ring, "alpha")) / "syncer.pub", tmp_path)
    shutil.copy(Path(folder(ring, "alpha")) / "alpha.key", tmp_path / "omega.key")
    with pytest.raises(RefusedError) as joining:
        attach(syncer.address, str(tmp_path))
    with pytest.raises(RefusedError, match=r"the key of learner 'alpha', not of 'omega'") as found:
        check(syncer.address, str(tmp_path))
    assert str(found.value) == str(joining.value)


def test_who_has_no_key_is_told_that_it_needs_one(syncer: Syncer) -> None:
    for attempt in (
        lambda: attach(syncer.address, None),
        lambda: fetch(syncer.address, 0.5),
        lambda: check(syncer.address, None, 0.5),
        lambda: attach(syncer.address, "insecure-plaintext"),
    ):
        with pytest.raises(RefusedError, match=r"known keys only.*`diloco keygen NAME`"):
            attempt()


def test_who_pins_another_syncer_s_key_is_told_both_keys(
    ring: Keyring, syncer: Syncer, tmp_path: Path
) -> None:
    other = Keyring(tmp_path)
    misled = Path(shutil.copytree(folder(ring, "alpha"), tmp_path / "misled"))
    shutil.copy(other.syncer / "syncer.pub", misled)
    with pytest.raises(RefusedError) as caught:
        attach(syncer.address, str(misled))
    assert fingerprint(other.door.own.public) in str(caught.value)
    assert "syncer.pub here is another syncer's" in str(caught.value)


def test_a_learner_with_keys_speaks_to_no_plaintext_syncer(ring: Keyring) -> None:
    with running_syncer() as plain:
        assert plain.status()["security"] == "plaintext on loopback"
        for attempt in (
            lambda: attach(plain.address, folder(ring, "alpha")),
            lambda: check(plain.address, folder(ring, "alpha"), 0.5),
        ):
            with pytest.raises(RefusedError, match="speaks plaintext, but keys are given here"):
                attempt()


def test_a_known_key_under_another_name_is_refused_and_harms_nobody(
    ring: Keyring, syncer: Syncer, tmp_path: Path
) -> None:
    with Forged(syncer.address, "alpha", SPECS, keys=ring.line("alpha")) as alpha:
        alpha.join()
        alpha.take()
        with Forged(
            syncer.address,
            "alpha",
            SPECS,
            keys=ring.line("beta"),
            incarnation=alpha.incarnation,  # even so
        ) as impostor:
            impostor.hello()
            refusal = impostor.hear(msg.Refuse)
            assert refusal.code == "identity"
            assert "has the key of learner 'beta', not of 'alpha'" in refusal.text
            impostor.say(msg.Goodbye(epoch=alpha.epoch))
            impostor.hear(msg.HelloRequired)
        alpha.progress(alpha.clock + 1)
        assert alpha.push(alpha.pulled(), torch.full((1000,), 1e-3)).fate == "merged"
    renamed = tmp_path / "renamed"
    shutil.copytree(folder(ring, "beta"), renamed)
    (renamed / "beta.key").rename(renamed / "alpha.key")
    with pytest.raises(RefusedError) as caught:
        attach(syncer.address, str(renamed))
    assert (caught.value.code, caught.value.exit_code) == ("identity", 77)
    with pytest.raises(RefusedError, match="not of 'alpha'"):
        diloco_plugin.shard([1, 2], syncer.address, keys=str(renamed))
    until(lambda: not syncer.status()["learners"])


def test_a_token_is_worth_nothing_without_the_key_of_its_learner(
    ring: Keyring, syncer: Syncer
) -> None:
    before = syncer.status()["strange_messages"].get("stranger", 0)
    with Forged(syncer.address, "alpha", SPECS, keys=ring.line("alpha")) as alpha:
        welcome = alpha.join()
        address = Address.parse(syncer.address).with_port(welcome.bulk_port)
        with line_to(str(address), ring.line("beta"), "bulk") as thief:
            until(lambda: thief.send(encode(msg.BulkHello(token=welcome.token))))
            thief.send(encode(msg.Want(kind="fetch", fragment=0, key=0, first=0, count=1)))
            until(lambda: syncer.status()["strange_messages"].get("stranger", 0) == before + 2)
            assert thief.receive() == []
        alpha.take()  # its own connection still serves it
    until(lambda: not syncer.status()["learners"])


def test_a_routing_id_that_was_somebody_s_proves_nothing(ring: Keyring, syncer: Syncer) -> None:
    """Whoever takes the id of a connection that is gone does not become who was there."""
    incarnation = secrets.token_hex(16)
    tensors = describe(SPECS)
    hello = msg.Hello(
        protocol=msg.PROTOCOL, run="", name="alpha", incarnation=incarnation, tensors=tensors
    )
    address = Address.parse(syncer.address)
    context = new_context()

    def squatter(name: str) -> zmq.Socket[bytes]:
        dealer = new_dealer(context, "control", address, ring.line(name))
        dealer.setsockopt(zmq.ROUTING_ID, b"a famous id")
        dealer.connect(str(address))
        return dealer

    def answer(dealer: zmq.Socket[bytes], message: msg.Message) -> msg.Message:
        """The id is free only a moment after its holder has gone: ask until there is an answer."""

        def attempt() -> bytes:
            if dealer.getsockopt(zmq.EVENTS) & zmq.POLLOUT:  # type: ignore[operator]
                dealer.send(encode(message))
            return dealer.recv() if dealer.poll(200) else b""

        return decode_to_learner(until(attempt))

    try:
        alpha = squatter("alpha")
        welcome = answer(alpha, hello)
        assert isinstance(welcome, msg.Welcome)
        alpha.close(linger=0)

        def take_over() -> msg.Message | None:
            beta = squatter("beta")
            try:
                return answer(beta, msg.Goodbye(epoch=welcome.epoch))
            except AssertionError:
                return None
            finally:
                beta.close(linger=0)

        assert isinstance(until(take_over, 30), msg.HelloRequired)
        assert [learner["name"] for learner in syncer.status()["learners"]] == ["alpha"]
        with Forged(
            syncer.address, "alpha", SPECS, incarnation=incarnation, keys=ring.line("alpha")
        ) as back:
            back.join()
            back.take()
        until(lambda: not syncer.status()["learners"])
    finally:
        context.destroy(linger=0)


# ---- the list changes ----


def test_sighup_admits_and_bars_while_others_train_on(tmp_path: Path) -> None:
    ring = Keyring(tmp_path)
    ring.learner("alpha")
    ring.learner("beta", admitted=False)
    flags = (*FLAGS, "--keys", str(ring.syncer), "--lease", "60")
    with Daemon(*flags, bind=f"tcp://{here()}:*") as daemon:
        address = daemon.address
        operator = visitor_keys(address, str(ring.syncer))

        def present() -> list[str]:
            return [learner["name"] for learner in fetch(address, keys=operator)["learners"]]

        def complains() -> bool:
            problems = fetch(address, keys=operator)["problems"]
            return any("the old list of keys stays" in problem for problem in problems)

        with Trainee(
            small_model(0), address, "alpha", keys=folder(ring, "alpha"), close_timeout=1.0
        ) as alpha:
            alpha.wait(lambda: alpha.merged > 2)
            ring.admit("beta")
            (ring.syncer / "learners.d" / "broken.pub").write_text("nonsense")
            daemon.send(signal.SIGHUP)
            until(lambda: "the old list of keys stays" in daemon.err)
            assert "broken.pub has 8 characters instead of 40" in daemon.err
            assert complains()
            (ring.syncer / "learners.d").rename(ring.syncer / "away")
            daemon.send(signal.SIGHUP)
            until(lambda: f"cannot read {ring.syncer}/learners.d: No such file" in daemon.err)
            (ring.syncer / "away").rename(ring.syncer / "learners.d")
            assert present() == ["alpha"]
            (ring.syncer / "learners.d" / "broken.pub").unlink()
            daemon.send(signal.SIGHUP)
            until(lambda: "admitted learners: 2; new: beta; no more: none" in daemon.err)
            assert not complains()
            with Trainee(small_model(1), address, "beta", keys=folder(ring, "beta")) as beta:
                beta.wait(lambda: beta.merged > 2)
                ring.bar("alpha")
                daemon.send(signal.SIGHUP)
                until(lambda: present() == ["beta"], 10, "long before its lease")
                assert alpha.learner is not None
                link = alpha.learner._core.link  # type: ignore[union-attr]
                until(lambda: link.refusal is not None and link.refusal[0] == "key", 20)
                before, steps = beta.merged, alpha.steps
                beta.wait(lambda: beta.merged > before + 2)
                alpha.wait(lambda: alpha.steps > steps)  # alone, but it trains
                assert re.search(r"learner alpha \(key .*\)#\w+ is turned away \(key\)", daemon.err)
                said = "\n".join(fetch(address, keys=operator)["problems"])
                assert re.search(r"learner 'alpha \(key .* off the list\)' was turned away", said)
                with pytest.raises(RefusedError, match="do not accept each other's keys"):
                    attach(address, folder(ring, "alpha"))
                said = "\n".join(fetch(address, keys=operator)["problems"])
                assert re.search(r"alpha \(key .* off the list\) was refused \d+ time", said)
            ring.bar("beta")
            daemon.send(signal.SIGHUP)
            until(lambda: "WARNING SIGHUP: nobody is admitted" in daemon.err)
            said = "\n".join(fetch(address, keys=operator)["problems"])
            assert f"nobody is admitted: {ring.syncer}/learners.d holds no NAME.pub" in said
        daemon.send(signal.SIGTERM)
        assert daemon.wait() == 0
        assert "Traceback" not in daemon.err


def test_a_learner_that_came_before_its_key_joins_once_it_is_admitted(tmp_path: Path) -> None:
    ring = Keyring(tmp_path)
    ring.learner("alpha", admitted=False)
    with running_syncer(config={"keys": str(ring.syncer)}) as syncer:
        options = {"keys": folder(ring, "alpha"), "require_syncer": False}
        with Trainee(small_model(0), syncer.address, "alpha", **options) as alpha:
            alpha.wait(lambda: syncer.status()["refused_keys"])
            ring.admit("alpha")
            syncer.reload()
            alpha.wait(lambda: alpha.learner is not None and alpha.learner.connected, 40)


def test_a_key_that_is_exchanged_bars_the_old_one(tmp_path: Path) -> None:
    ring = Keyring(tmp_path)
    old = ring.line("alpha")
    save_file({"w": torch.zeros(1000)}, tmp_path / "model.safetensors")
    config = {"keys": str(ring.syncer), "init": str(tmp_path)}
    with (
        running_syncer(fragments=1, config=config) as syncer,
        Forged(syncer.address, "alpha", SPECS, keys=old) as alpha,
    ):
        alpha.join()
        alpha.take()
        ring.bar("alpha")
        shutil.rmtree(folder(ring, "alpha"))
        new = ring.line("alpha")
        assert new.own != old.own
        syncer.reload()
        assert "not admitted" in alpha.hear(msg.Fence).reason
        alpha.hello()
        assert alpha.hear(msg.Refuse).code == "key"
        alpha.say(msg.StatusRequest())
        assert alpha.hear(msg.Refuse).code == "key"
        with Forged(syncer.address, "alpha", SPECS, keys=new) as successor:
            successor.join()
            successor.take()


def test_one_key_that_describes_other_models_keeps_no_newcomer_out(
    ring: Keyring, tmp_path: Path
) -> None:
    """After a restart, too, when the syncer has read no description yet."""
    specs = many_weights(4000)
    config = {"keys": str(ring.syncer), "state": str(tmp_path / "state")}
    parameters = {"sync_every": 1, "fragments": 1, "overlap": 0}
    with (
        running_syncer(**parameters, config=config) as syncer,
        Forged(syncer.address, "alpha", specs, keys=ring.line("alpha")) as seeder,
    ):
        seeder.join()
        seeder.seed([torch.zeros(4000)])
    with (
        running_syncer(**parameters, config=config) as syncer,
        Forged(syncer.address, "beta", specs, keys=ring.line("beta")) as other,
    ):
        codes = []
        for more in range(1, 4):
            other.hello(tensors=describe(many_weights(4000 + more)))
            codes.append(other.hear(msg.Refuse).code)
        assert codes == ["layout", "busy", "busy"]
        with Forged(syncer.address, "alpha", specs, keys=ring.line("alpha")) as right:
            right.join()
            right.take()
