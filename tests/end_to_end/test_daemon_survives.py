"""Things that once ended the daemon, or stopped its rounds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import diloco_plugin
from diloco_plugin.errors import ConfigError, RefusedError
from diloco_plugin.wire import messages as msg
from diloco_plugin.wire.framing import encode
from tests.end_to_end.fleet import largest_difference, run_all, sgd, small_model, values
from tests.end_to_end.forged import Forged, many_weights, one_weight
from tests.syncers import global_model, running_syncer
from tests.waiting import until

CHUNK = 262_144


def test_a_learner_that_dies_in_mid_fetch_takes_nobody_along() -> None:
    specs = one_weight(8 * CHUNK)
    with (
        running_syncer(sync_every=1, fragments=1, overlap=0) as syncer,
        Forged(syncer.address, "seeder", specs) as seeder,
    ):
        seeder.join()
        seeder.seed([torch.zeros(8 * CHUNK)])
        for number in range(6):
            with Forged(syncer.address, f"dies-{number}", specs) as dying:
                dying.join()
                told = dying.hear(msg.Announce)
                want = msg.Want(kind="fetch", fragment=0, key=told.version, first=0, count=4)
                for _ in range(3):
                    dying.say_bulk(encode(want))
        with Forged(syncer.address, "lives", specs) as living:
            living.join()
            living.take()


def test_who_wants_more_than_it_reads_is_hung_up_on() -> None:
    specs = one_weight(70 * CHUNK)
    with (
        running_syncer(sync_every=1, fragments=1, overlap=0) as syncer,
        Forged(syncer.address, "seeder", specs) as seeder,
    ):
        seeder.join()
        seeder.seed([torch.zeros(70 * CHUNK)])
        with Forged(syncer.address, "greedy", specs) as greedy:
            greedy.join()
            told = greedy.hear(msg.Announce)
            want = msg.Want(kind="fetch", fragment=0, key=told.version, first=0, count=64)
            for _ in range(8):
                greedy.say_bulk(encode(want))
            with Forged(syncer.address, "polite", specs) as polite:
                polite.join()
                polite.take()


def test_one_bulk_connection_speaks_for_one_learner() -> None:
    with (
        running_syncer(sync_every=1, fragments=1, overlap=0) as syncer,
        Forged(syncer.address, "a", one_weight(1000)) as a,
    ):
        a.join()
        a.seed([torch.zeros(1000)])
        with Forged(syncer.address, "b", one_weight(1000)) as b:
            welcome = b.join()
            b.take()
            a.say_bulk(encode(msg.BulkHello(token=welcome.token)))
            until(lambda: syncer.status()["strange_messages"].get("stranger"))
            a.say(msg.Goodbye(epoch=a.epoch))
            until(lambda: len(syncer.status()["learners"]) == 1)
            b.progress(1)
            pull = b.pulled()
            assert b.push(pull, torch.ones(1000)).fate == "merged"


def test_an_outer_optimizer_that_refuses_the_model_refuses_the_learner() -> None:
    model = torch.nn.Linear(3, 1)  # its bias is no matrix
    with running_syncer(outer_optimizer="Muon") as syncer:
        with pytest.raises(RefusedError, match="Muon"):
            diloco_plugin.attach(model, sgd(model), syncer.address, name="a")
        assert syncer.status()["refused"] == {"layout": 1}


def test_a_clock_that_nobody_can_have_is_not_believed() -> None:
    with (
        running_syncer(sync_every=4, fragments=2, overlap=1) as syncer,
        Forged(syncer.address, "liar", one_weight(10)) as liar,
    ):
        liar.join()
        liar.seed([torch.zeros(10)])
        liar.progress(2**53)
        until(lambda: syncer.status()["clock"] > 0)
        assert syncer.status()["clock"] < 2**40


def test_a_learner_that_is_stuck_while_it_closes_stops_nobody() -> None:
    with (
        running_syncer(sync_every=2, fragments=1, overlap=1, lease=2.0) as syncer,
        Forged(syncer.address, "stuck", one_weight(10)) as stuck,
        Forged(syncer.address, "works", one_weight(10)) as works,
    ):
        stuck.join()
        stuck.seed([torch.zeros(10)])
        works.join()
        works.take()
        until(
            lambda: (
                "live" in {m["state"] for m in syncer.status()["learners"] if m["name"] == "works"}
            )
        )
        stuck.say(msg.CloseRequest(epoch=stuck.epoch, fragments=(0,)))
        pull = works.pulled(closing=True)
        works.offer(pull)

        def over() -> bool:
            for one in (stuck, works):  # alive, both of them, but the first one answers nothing
                one.say(msg.Heartbeat(epoch=one.epoch))
            return syncer.status()["rounds"]["in_flight"] == 0

        until(over, 15, "the closing round ends without the stuck learner")
        assert {m["name"] for m in syncer.status()["learners"]} == {"stuck", "works"}


@pytest.mark.parametrize(("learners", "overlap"), [(3, 1), (4, 0)])
def test_lockstep_learners_close_together(learners: int, overlap: int) -> None:
    models = [small_model(m) for m in range(learners)]

    def job(m: int, address: str) -> None:
        optimizer = sgd(models[m])
        with diloco_plugin.attach(models[m], optimizer, address, name=f"l{m}", close_timeout=20):
            for _ in range(7):  # in the middle of a window: everything is left to close
                for parameter in models[m].parameters():
                    parameter.grad = torch.ones_like(parameter) * (m + 1)
                optimizer.step()

    with running_syncer(
        lockstep=True, learners=learners, sync_every=4, fragments=4, overlap=overlap
    ) as syncer:
        run_all([lambda m=m: job(m, syncer.address) for m in range(learners)])
        until(lambda: syncer.status()["learners"] == [], message="all have said goodbye")
        final = global_model(syncer)
    names = [name for name, _ in models[0].named_parameters()]
    spread = [largest_difference(values(m), [final[name] for name in names]) for m in models]
    assert min(spread) == 0.0, "the last one to leave holds another model"


def test_a_model_that_could_not_be_written_in_the_end_is_refused_at_the_start(
    tmp_path: Path,
) -> None:
    file = tmp_path / "file"
    file.touch()
    with (
        pytest.raises(ConfigError, match="cannot be written"),
        running_syncer(config={"export": str(file / "model.safetensors")}),
    ):
        pass


def test_many_learners_with_another_model_keep_nobody_out_who_has_the_right_one() -> None:
    specs, codes = many_weights(4000), []
    with (
        running_syncer(sync_every=1, fragments=1, overlap=0) as syncer,
        Forged(syncer.address, "seeder", specs) as seeder,
    ):
        seeder.join()
        seeder.seed([torch.zeros(4000)])
        for more in range(1, 4):
            with Forged(syncer.address, f"other-{more}", many_weights(4000 + more)) as other:
                other.hello()
                codes.append(other.hear(msg.Refuse).code)
        with Forged(syncer.address, "right", specs) as right:
            right.join()
            right.take()
        with Forged(syncer.address, "huge", many_weights(10_000)) as huge:
            huge.hello()
            assert "10,000" in huge.hear(msg.Refuse).text
    assert codes == ["layout", "busy", "busy"]
