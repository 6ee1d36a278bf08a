"""A process must always be able to exit, whatever its sockets still hold."""

from __future__ import annotations

import subprocess
import sys

import pytest

SETUP = """
import socket, time
from diloco_plugin.net.asking import ask
from diloco_plugin.net.sockets import Door, Line, Sent, new_context

context = new_context()
door = Door(context, "tcp://127.0.0.1:*", "bulk")
line = Line(context, door.address, "bulk")
deadline = time.monotonic() + 10
while not line.send(b"hello"):
    assert time.monotonic() < deadline
while not (heard := door.receive()):
    assert time.monotonic() < deadline
payload = memoryview(bytearray(1 << 20))
for _ in range(64):  # nobody reads
    assert line.send(b"h", payload)
while door.send(heard[0][0], b"h", payload) is Sent.OK:
    pass
silent = socket.create_server(("127.0.0.1", 0))  # accepts, says nothing
lost = Line(context, f"tcp://127.0.0.1:{silent.getsockname()[1]}", "control")
lost.send(b"x")
"""

ENDINGS = {
    "nothing closed": "",
    "context destroyed": "context.destroy(linger=0)",
    "sockets closed, then terminated": "door.close(); line.close(); lost.close(); context.term()",
    "an exception": "raise SystemExit(0)",
    "in a thread": (
        "import threading\n"
        "from diloco_plugin.net.sockets import Poll\n"
        "poll = Poll(); poll.add(lost)\n"
        "threading.Thread(target=poll.wait, args=(None,), daemon=True).start()\n"
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_process_exits_with_messages_queued_to_a_dead_peer(ending: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SETUP + ENDINGS[ending] + "\nprint('end of program', flush=True)"],
        timeout=20,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_what_was_never_closed_says_nothing_when_the_interpreter_ends() -> None:
    script = (
        "from diloco_plugin.net.sockets import Door, Line, new_context\n"
        "context = new_context()\n"
        "door = Door(context, 'tcp://127.0.0.1:*', 'bulk')\n"
        "line = Line(context, door.address, 'bulk')\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", script],
        timeout=20,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
