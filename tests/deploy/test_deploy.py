"""docs/deploy.md, followed word by word: network namespaces are the other machines."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco_plugin.config import resolve
from diloco_plugin.credentials import visitor_keys
from diloco_plugin.status import fetch
from tests.end_to_end.processes import ROOT, Daemon, Process
from tests.waiting import until

GUIDE = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
LEARNER = """
import sys, torch, diloco_plugin
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with diloco_plugin.attach(model, optimizer, sys.argv[1]) as learner:
    print("joined as", learner.name, flush=True)
    while not learner.should_stop:
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
"""


def block(language: str) -> str:
    """The only block of this language in the guide."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)
    return str(found)


class Machine:
    """A machine of its own, as far as the network goes: it sees the syncer's and nothing else."""

    def __init__(self, number: int, home: Path) -> None:
        self.name, self.home = f"diloco{os.getpid()}n{number}", home
        self.syncer = f"198.18.{number}.1"
        self._link, self._number = f"dl{os.getpid()}n{number}"[-13:], number

    def __enter__(self) -> Machine:
        inner = f"{self._link}i"
        here = f"198.18.{self._number}"
        for command in (
            f"ip netns add {self.name}",
            f"ip link add {self._link} type veth peer name {inner}",
            f"ip link set {inner} netns {self.name}",
            f"ip addr add {here}.1/30 dev {self._link}",
            f"ip link set {self._link} up",
            f"ip -n {self.name} addr add {here}.2/30 dev {inner}",
            f"ip -n {self.name} link set {inner} up",
            f"ip -n {self.name} link set lo up",
        ):
            done = subprocess.run(command.split(), capture_output=True, text=True)
            if done.returncode:
                self.__exit__()
                pytest.skip(f"network namespaces need root and iproute2: {done.stderr}")
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["ip", "netns", "del", self.name], capture_output=True)
        subprocess.run(["ip", "link", "del", self._link], capture_output=True)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a Python program there, to its end."""
        command = ["ip", "netns", "exec", self.name, sys.executable, *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env=self._environment, timeout=120
        )

    def start(self, *arguments: str) -> Process:
        """Start a Python program there."""
        place = "import os, sys; os.execvp('ip', ['ip', 'netns', 'exec', *sys.argv[1:]])"
        return Process("-c", place, self.name, sys.executable, *arguments, env=self._environment)

    @property
    def _environment(self) -> dict[str, str]:
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        return {**os.environ, "PYTHONPATH": paths, "HOME": str(self.home), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    if shutil.which("ip") is None or os.geteuid():
        pytest.skip("network namespaces need root and iproute2")
    with Machine(1, tmp_path / "berlin") as first, Machine(2, tmp_path / "tokyo") as second:
        yield first, second


def diloco(*arguments: str) -> str:
    """Run a `diloco` command on the syncer's machine."""
    command = [sys.executable, "-m", "diloco_plugin.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout


def look(address: str, keys: Path) -> list[dict[str, Any]]:
    """The learners that the operator sees, with the syncer's own key."""
    security = visitor_keys(address, str(keys))
    return list(fetch(address, keys=security)["learners"])


def bring(keys: Path, name: str, home: Path) -> None:
    """Take a learner's secret and the syncer's public key to the learner's machine."""
    folder = home / ".config" / "diloco"
    folder.mkdir(parents=True, mode=0o700)
    shutil.move(keys / f"{name}.key", folder)
    shutil.copy(keys / "syncer.pub", folder)


def test_from_keygen_to_two_learners_on_other_machines(
    machines: tuple[Machine, Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a learner of this process left its name there, for processes of its own
    monkeypatch.delenv("DILOCO_NAME", raising=False)
    keys, state = tmp_path / "keys", tmp_path / "state"
    configuration = tmp_path / "syncer.toml"
    text = block("toml").replace("/etc/diloco/keys", str(keys)).replace(":5555", ":*")
    text = text.replace("/var/lib/diloco", str(tmp_path))
    configuration.write_text(text + "sync_every = 4\nfragments = 2\noverlap = 1\n")
    diloco("keygen", "--keys", str(keys))
    diloco("keygen", "berlin", "--keys", str(keys))
    bring(keys, "berlin", machines[0].home)
    script = tmp_path / "train.py"
    script.write_text(LEARNER)
    bind = "tcp://0.0.0.0:*"
    with Daemon("--config", str(configuration), bind=bind) as daemon:
        port = daemon.address.rpartition(":")[2]
        berlin, tokyo = (f"tcp://{machine.syncer}:{port}" for machine in machines)
        here = f"tcp://127.0.0.1:{port}"

        checked = machines[0].run("-m", "diloco_plugin.cli", "check", berlin)
        assert checked.stdout.startswith("yes"), checked.stdout + checked.stderr
        with machines[0].start(str(script), berlin) as first:
            first.prints("joined as berlin", 60)
            # a second one is added while the first trains
            (machines[1].home / ".config").mkdir(parents=True)
            diloco("keygen", "tokyo", "--keys", str(keys))
            bring(keys, "tokyo", machines[1].home)
            early = machines[1].run("-m", "diloco_plugin.cli", "check", tokyo)
            assert early.returncode != 0
            assert "learners.d" in early.stdout + early.stderr
            daemon.send(signal.SIGHUP)
            until(lambda: "new: tokyo" in daemon.err, 30)
            with machines[1].start(str(script), tokyo) as second:
                second.prints("joined as tokyo", 60)

                def both_merge() -> bool:
                    learners = look(here, keys)
                    return len(learners) == 2 and all(one["rounds_joined"] > 3 for one in learners)

                until(both_merge, 60)
                # and one is thrown out
                (keys / "learners.d" / "tokyo.pub").unlink()
                daemon.send(signal.SIGHUP)
                until(lambda: len(look(here, keys)) == 1, 30)
            daemon.send(signal.SIGTERM)
            assert daemon.wait(60) == 0
    assert (tmp_path / "model.safetensors").exists()
    assert (state / "run.json").exists()


def test_the_unit_starts_what_the_guide_describes() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(block("ini"))
    command = shlex.split(unit["Service"]["ExecStart"])
    assert command == ["/opt/diloco/bin/diloco", "syncer", "--config", "/etc/diloco/syncer.toml"]
    prevented = {int(code) for code in unit["Service"]["RestartPreventExitStatus"].split()}
    assert prevented == {2, 4, 70, 78}  # those that another start cannot change


def test_the_configuration_of_the_guide_is_one(tmp_path: Path) -> None:
    path = tmp_path / "syncer.toml"
    path.write_text(block("toml"))
    config = resolve({}, {}, path).config
    assert config.durability == "commit"
    assert config.state.startswith("/var/lib/diloco")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = block("ini").replace("/opt/diloco/bin/diloco", "/bin/true").replace("User=diloco\n", "")
    path = tmp_path / "diloco-syncer.service"
    path.write_text(unit)
    done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True)
    ours = [line for line in done.stderr.splitlines() if "diloco-syncer" in line]
    assert not ours
