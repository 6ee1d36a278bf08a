"""The process of a learner always ends: soon, with the right code, without noise from threads."""

from __future__ import annotations

from pathlib import Path

from tests.end_to_end.family import Family
from tests.end_to_end.processes import Daemon
from tests.syncers import running_syncer
from tests.waiting import until

#: Ending: exit code, and what its own traceback ends with if it has one.
ENDINGS = {
    "learner.close()": (0, ""),
    "with learner: step()": (0, ""),
    "pass  # no close at all": (0, ""),
    "del learner, model, optimizer": (0, ""),
    "with learner: raise ValueError('ours')": (1, "ValueError: ours"),
    "raise ValueError('ours')": (1, "ValueError: ours"),
    "with learner: raise KeyboardInterrupt": (-2, "KeyboardInterrupt"),
    "with learner: sys.exit(5)": (5, ""),
    "sys.exit(5)": (5, ""),
}


def join(address: str, **options: object) -> str:
    arguments = "".join(f", {key}={value!r}" for key, value in options.items())
    return f"""
learner = diloco_plugin.attach(model, optimizer, {address!r}{arguments})
for _ in range(30):
    step()
print('trained', flush=True)
"""


def check(family: Family, name: str, code: int, ends_with: str) -> None:
    assert family.ends(name, 20) == code, family.err(name)
    err = family.err(name)
    assert err.count("Traceback") == bool(ends_with), err
    assert err.rstrip().endswith(ends_with), err
    assert "Exception ignored" not in err
    assert "Fatal" not in err


def test_a_process_ends_whatever_its_loop_does(tmp_path: Path) -> None:
    with running_syncer(sync_every=4, fragments=2, overlap=1, lease=600) as syncer:
        bodies = {ending: join(syncer.address, name=ending) + ending for ending in ENDINGS}
        with Family(tmp_path, bodies) as family:
            for ending, (code, ends_with) in ENDINGS.items():
                family.prints(ending, "trained")
                check(family, ending, code, ends_with)
        # every one of them has said goodbye, so no round waits for the end of its lease
        until(lambda: not syncer.status()["learners"])


def test_a_process_ends_though_its_syncer_is_dead(tmp_path: Path) -> None:
    wait = "while learner.connected: step()\nstep()\n"
    endings = {
        "learner.close()": (0, ""),
        "pass  # no close at all": (0, ""),
        "with learner: raise ValueError('ours')": (1, "ValueError: ours"),
    }
    with Daemon("--sync-every", "4", "--fragments", "2") as daemon:
        start = join(daemon.address, close_timeout=3)
        bodies = {ending: start + wait + ending for ending in endings}
        with Family(tmp_path, bodies) as family:
            for ending in endings:
                family.prints(ending, "trained")
            daemon.kill()
            for ending, (code, ends_with) in endings.items():
                check(family, ending, code, ends_with)
                assert family.err(ending).count("lost the syncer") == 1
                given_up = family.err(ending).count("left without a closing round")
                assert given_up == ("close()" in ending)
