"""``diloco status`` and ``diloco check``: what a syncer says about its run, in words."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from diloco_plugin.core.policy import counted
from diloco_plugin.errors import DiLoCoError, RefusedError, UnreachableError, WireError
from diloco_plugin.net.address import Address

if TYPE_CHECKING:
    from diloco_plugin.net.keys import Insecure, LineKeys

TIMEOUT_SECONDS: Final = 5.0
WATCH_SECONDS: Final = 2.0

Body = Mapping[str, Any]


def fetch(
    address: str,
    timeout_seconds: float = TIMEOUT_SECONDS,
    keys: LineKeys | Insecure | None = None,
    *,
    name: str | None = None,
) -> dict[str, Any]:
    """The status body of the syncer at `address`; see ``Syncer.status``.

    Args:
        name: of a learner that wants to join with these keys; None: somebody looks.

    Raises:
        UnreachableError: nothing answered in time; says how far it got.
        RefusedError: the syncer does not answer the owner of this key (any more), or none, or
            would not let it in under that name.
        WireError: something answered, but not as a syncer does.
    """
    # Late, as everything that `diloco --help` does not need.
    from diloco_plugin.net.asking import ask
    from diloco_plugin.wire.framing import decode_to_learner, encode
    from diloco_plugin.wire.messages import Refuse, Status, StatusRequest

    request = encode(StatusRequest(name=name))
    answer = decode_to_learner(ask(address, request, timeout_seconds, keys))
    if isinstance(answer, Refuse):
        raise RefusedError(answer.code, answer.text)
    if not isinstance(answer, Status):
        raise WireError(
            "unexpected",
            f"{address} answered a status request with {type(answer).__name__}. Is a syncer of the"
            " same version running there?",
        )
    return answer.body


def show(
    address: str, *, keys: str | None = None, as_json: bool = False, watch: bool = False
) -> int:
    """Prints the status once, or again and again until interrupted; returns the exit code."""
    from diloco_plugin.credentials import visitor_keys

    security = visitor_keys(address, keys)
    body = fetch(address, TIMEOUT_SECONDS, security)
    while True:
        if watch and sys.stdout.isatty() and not as_json:
            sys.stdout.write("\x1b[H\x1b[2J")  # cursor home, clear
        sys.stdout.write(json.dumps(body) + "\n" if as_json else render(body))
        sys.stdout.flush()
        if not watch:
            return 0
        body = _next(address, security)


def _next(address: str, keys: LineKeys | Insecure | None) -> dict[str, Any]:
    """The next status; a syncer that restarts is waited for."""
    while True:
        time.sleep(WATCH_SECONDS)
        try:
            return fetch(address, TIMEOUT_SECONDS, keys)
        except DiLoCoError as error:
            sys.stderr.write(f"diloco: {printable(error)}\n")


def printable(value: object) -> str:
    """Text that cannot move a terminal's cursor: names come from other machines."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(value))


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Lines of a plain table: the first column to the left, the others to the right."""
    cells = [list(head), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = []
    for row in cells:
        first = row[0].ljust(widths[0])
        rest = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append(("  " + "  ".join([first, *rest])).rstrip())
    return lines


def render(body: Body) -> str:
    """A status as text. Keys that an older or newer syncer does not have are left out."""
    sections = [_headline(body), _learners(body), _fragments(body), _rounds(body), _problems(body)]
    return "\n".join(line for section in sections for line in section) + "\n"


def _headline(body: Body) -> list[str]:
    end = f" of {body['steps']}" if body.get("steps") else ""
    line = (
        f"run {printable(body.get('run', '?'))!r}: {printable(body.get('state', '?'))},"
        f" clock {body.get('clock', 0)}{end}, up {_span(body.get('uptime_s', 0.0))}"
        f" (epoch {body.get('epoch', '?')}, diloco-plugin {printable(body.get('version', '?'))},"
        f" protocol {body.get('protocol', '?')})"
    )
    return [line, *_security(body), ""]


def _security(body: Body) -> list[str]:
    if "security" not in body:
        return []
    line = f"security: {printable(body['security'])}"
    if "admitted" in body:
        line += f", {len(body['admitted'])} admitted; the syncer's is {printable(body['key'])}"
    return [line]


def _learners(body: Body) -> list[str]:
    learners = body.get("learners", [])
    if not learners:
        return ["learners: none", ""]
    head = ("learner", "state", "step", "lag", "s/step", "joined", "share", "tokens", "lease")
    rows = [
        (
            learner.get("name", "?"),
            learner.get("state", "?"),
            learner.get("clock", 0),
            learner.get("lag", 0),
            f"{learner.get('step_s', 0.0):.3g}",
            f"{learner.get('rounds_joined', 0)}/{learner.get('rounds_asked', 0)}",
            _percent(learner.get("rounds_joined", 0), learner.get("rounds_asked", 0)),
            _count(learner.get("tokens", 0)),
            f"{learner.get('lease_s', 0.0):.0f} s",
        )
        for learner in learners
    ]
    return [f"learners: {_present(body)}", *table(head, rows), ""]


def live_count(body: Body) -> int:
    """How many learners take part right now."""
    return sum(learner.get("state") == "live" for learner in body.get("learners", []))


def _present(body: Body) -> str:
    """How many learners there are, e.g. "3 of 4 live"."""
    expected = body.get("parameters", {}).get("learners", 0) or len(body.get("learners", []))
    return f"{live_count(body)} of {max(expected, live_count(body))} live"


def _fragments(body: Body) -> list[str]:
    """Neighboring fragments of the same version and state share a line."""
    fragments = sorted(body.get("fragments", []), key=lambda f: f.get("index", 0))
    runs: list[tuple[int, int, Any, Any]] = []
    for fragment in fragments:
        index, version, state = (fragment.get(key, 0) for key in ("index", "version", "state"))
        if runs and runs[-1][1] == index - 1 and runs[-1][2:] == (version, state):
            runs[-1] = (runs[-1][0], index, version, state)
        else:
            runs.append((index, index, version, state))
    if not runs:
        return []
    elements = sum(fragment.get("elements", 0) for fragment in fragments)
    lines = [f"fragments: {len(fragments)}, {_count(elements)} elements"]
    for first, last, version, state in runs:
        span = str(first) if first == last else f"{first}-{last}"
        lines.append(f"  {span}: version {version}" + (f", {printable(state)}" if state else ""))
    return [*lines, ""]


def _rounds(body: Body) -> list[str]:
    lines = []
    rounds = body.get("rounds", {})
    if rounds:
        lines.append(
            f"rounds: {rounds.get('merged', 0)} merged, {rounds.get('abandoned', 0)} abandoned,"
            f" {rounds.get('in_flight', 0)} in flight, {rounds.get('queued', 0)} queued;"
            f" {rounds.get('joined_mean', 0.0):.1f} learners per round; quorum after"
            f" {rounds.get('quorum_s', 0.0):.2f} s, grace {rounds.get('grace_s', 0.0):.2f} s,"
            f" sync {rounds.get('sync_s', 0.0):.2f} s"
        )
    fates = dict(body.get("fates", {}))
    rejected = fates.pop("rejected", {})
    if fates or rejected:
        words = [f"{count} {printable(fate)}" for fate, count in fates.items()]
        why = ", ".join(f"{printable(reason)} {n}" for reason, n in sorted(rejected.items()))
        words.append(f"{sum(rejected.values())} rejected" + (f" ({why})" if why else ""))
        lines.append("pushes: " + ", ".join(words))
    if any(body.get("refused", {}).values()):
        codes = ", ".join(f"{printable(c)} {n}" for c, n in sorted(body["refused"].items()))
        lines.append(f"refused at the door: {codes}")
    return lines


def _problems(body: Body) -> list[str]:
    problems = body.get("problems", [])
    if not problems:
        return ["problems: none"]
    return ["problems:", *(f"  - {printable(problem)}" for problem in problems)]


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def _count(number: float) -> str:
    """A count with three digits: 124 M."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def _span(seconds: float) -> str:
    """A time span in its two largest units."""
    whole = int(seconds)
    if whole >= 86400:
        return f"{whole // 86400} d {whole % 86400 // 3600} h"
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    if whole >= 60:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole} s"


def check(
    address: str,
    keys: str | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    *,
    name: str | None = None,
) -> str:
    """Says, in a sentence, that a trainer on this machine could join the run at `address`.

    Args:
        name: of the learner, where the folder of keys holds those of several.

    Raises:
        ConfigError: the keys cannot be used; says which and why.
        RefusedError: the run takes nobody, or nobody with these keys or of this version.
        UnreachableError: no syncer answers there, or its second port cannot be reached.
    """
    from diloco_plugin._version import __version__
    from diloco_plugin.credentials import learner_keys
    from diloco_plugin.net.keys import LineKeys
    from diloco_plugin.wire.messages import PROTOCOL

    security = learner_keys(address, keys, name)
    joins_as = security.name if isinstance(security, LineKeys) else None
    began = time.monotonic()
    try:
        body = fetch(address, timeout_seconds, security, name=joins_as)
    except WireError as error:
        raise UnreachableError(
            f"something answers at {address}, but not as a syncer of protocol {PROTOCOL} does"
            f" ({printable(error.reason)}); check the port, and that both sides have the same"
            f" version of diloco-plugin (here: {__version__})."
        ) from None
    milliseconds = 1000 * (time.monotonic() - began)
    where = f"run {printable(body.get('run', '?'))!r} at {address}"
    if body.get("protocol") != PROTOCOL:
        raise RefusedError(
            "protocol",
            f"{where} speaks protocol {body.get('protocol')} (diloco-plugin"
            f" {printable(body.get('version', '?'))}) and this machine speaks {PROTOCOL}"
            f" ({__version__}); install the same version on both.",
        )
    if body.get("state") in ("ending", "stopping"):
        raise RefusedError(
            body["state"],
            f"{where} is {body['state']} at clock {body.get('clock', 0)} and takes no new learners;"
            " start it again, with more --steps if it has reached its end.",
        )
    if body.get("state") in ("empty", "seeding") and body.get("rounds", {}).get("stuck"):
        why = printable(body["rounds"]["stuck"])
        raise RefusedError("room", f"{where} cannot save the first model: {why}")
    unreachable = _bulk_problem(address, body.get("bulk_port", 0), timeout_seconds)
    if unreachable:
        raise UnreachableError(f"{where} answers, but {unreachable}")
    return (
        f"{where} answers in {milliseconds:.0f} ms (protocol {PROTOCOL}, {_joined(body)},"
        f" clock {body.get('clock', 0)}); start your trainer with this address."
    )


def _joined(body: Body) -> str:
    live = live_count(body)
    expected = body.get("parameters", {}).get("learners", 0)
    return (f"{live} of " if expected else "") + counted(expected or live, "learner")


def _bulk_problem(address: str, port: int, timeout_seconds: float) -> str | None:
    """What is wrong with the second port, the one that fragments travel through."""
    parsed = Address.parse(address)
    if parsed.scheme != "tcp" or not port:
        return None
    try:
        socket.create_connection((parsed.host, port), timeout_seconds).close()
    except OSError as error:
        return (
            f"its bulk port {port}, through which the model travels, cannot be reached"
            f" ({error.strerror or error}); open port {port} on {parsed.host} as well."
        )
    return None
