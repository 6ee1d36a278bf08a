"""A replay finds the first decision that differs, and takes nothing but a tape for one."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import msgspec
import pytest

from diloco_plugin.cli import main
from diloco_plugin.core import actions as act
from diloco_plugin.core import events as ev
from diloco_plugin.core.parameters import Parameters
from diloco_plugin.core.syncer import SyncerCore
from diloco_plugin.errors import ConfigError, DamagedError
from diloco_plugin.store.records import RecordFile, read_records
from diloco_plugin.tape.codec import Step, decode_steps, encode_step, join_steps
from diloco_plugin.tape.recording import Recorder
from diloco_plugin.tape.replay import replay
from diloco_plugin.tape.segments import KIND, Header, segment_paths
from tests.tape.worlds import eventful


@pytest.fixture(scope="module")
def payloads(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The records of one segment with some hundred steps in many records."""
    folder = tmp_path_factory.mktemp("tape")
    recorder = Recorder(folder)
    eventful(1, 8, decide=recorder.step)
    recorder.close()
    header, *rest = read_records(segment_paths(folder)[0], KIND).payloads
    steps = [step for payload in rest for step in decode_steps(payload)]
    parts = [steps[at : at + 10] for at in range(0, len(steps), 10)]
    return [header, *(join_steps([encode_step(step) for step in part]) for part in parts)]


def write(path: Path, payloads: list[bytes], kind: str = KIND) -> Path:
    file = RecordFile.create(path, kind=kind)
    for payload in payloads:
        file.append(payload)
    file.close()
    return path


def header_of(core: SyncerCore, **changes: object) -> bytes:
    from diloco_plugin.tape.freezing import freeze

    header = Header(epoch=core.epoch, events_before=0, state=freeze(core))
    return msgspec.msgpack.encode(msgspec.structs.replace(header, **changes))


def test_the_same_is_said_with_counts(
    tmp_path: Path, payloads: list[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "000001.tape", payloads)
    events = sum(len(decode_steps(payload)) for payload in payloads[1:])
    assert main(["replay", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"the same: {events:,} events, ")
    assert out.endswith(" decisions, 1 life of the syncer\n")
    assert main(["replay", str(tmp_path / "000001.tape")]) == 0


def test_a_changed_decision_is_found_and_shown(
    tmp_path: Path, payloads: list[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [step for payload in payloads[1:] for step in decode_steps(payload)]
    place = next(
        i for i, step in enumerate(steps) if any(isinstance(a, act.Merge) for a in step.outcome)
    )
    outcome = tuple(
        dataclasses.replace(a, closing=not a.closing) if isinstance(a, act.Merge) else a
        for a in steps[place].outcome
    )
    steps[place] = Step(steps[place].event, outcome)
    write(tmp_path / "000001.tape", [payloads[0], join_steps([encode_step(s) for s in steps])])
    assert main(["replay", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert f"different at event {place + 1:,} (000001.tape)" in out
    assert type(steps[place].event).__name__ in out
    assert [line.split("(")[0] for line in out.splitlines() if line.strip()[0] == "!"] == [
        "    ! Merge",
        "    ! Merge",
    ]
    assert out.splitlines()[-1].startswith(f"the same before it: {place:,} events")


def test_a_decision_that_is_missing_or_was_raised_is_shown(tmp_path: Path) -> None:
    core, event = SyncerCore(Parameters(), epoch=1), ev.PlaceAsked(now_ns=1, name="a")
    for name, outcome in (("1", ()), ("2", "KeyError: 5")):
        steps = join_steps([encode_step(Step(event, outcome))])
        path = write(tmp_path / name, [header_of(core), steps])
        difference = replay(path, print).difference
        assert difference is not None
        assert "TellPlace" in difference.computed[0]
        assert any("nothing" in line or "KeyError" in line for line in difference.lines())


def test_a_state_that_does_not_follow_from_the_segment_before_is_found(tmp_path: Path) -> None:
    core = SyncerCore(Parameters(), epoch=1)
    write(tmp_path / "000001.tape", [header_of(core)])
    core.clock = 5
    write(tmp_path / "000002.tape", [header_of(core)])
    difference = replay(tmp_path, print).difference
    assert difference is not None
    assert difference.recorded == ("core[1].clock = 5",)
    assert difference.computed == ("core[1].clock = 0",)


def test_a_gap_is_told(tmp_path: Path) -> None:
    core, said = SyncerCore(Parameters(), epoch=1), list[str]()
    write(tmp_path / "000001.tape", [header_of(core)])
    write(tmp_path / "000003.tape", [header_of(core, events_before=1000)])
    assert replay(tmp_path, said.append).lives == 1
    assert said == ["events 1 to 1,000 are missing"]


def test_a_tape_of_another_version_says_so_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    core = SyncerCore(Parameters(), epoch=1)
    write(tmp_path / "000001.tape", [header_of(core, version="0.0.1")])
    assert main(["replay", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("000001.tape was made by version 0.0.1, this is ")
    write(tmp_path / "000002.tape", [header_of(core, version="9", state=["Core9", {}])])
    assert main(["replay", str(tmp_path)]) == 4
    assert "Replay it with diloco-plugin 9." in capsys.readouterr().err


def test_a_tape_that_was_cut_anywhere_is_replayed_to_there(
    tmp_path: Path, payloads: list[bytes]
) -> None:
    data = write(tmp_path / "whole", payloads[:12]).read_bytes()
    whole, path, before = replay(tmp_path / "whole", print), tmp_path / "cut", 0
    for size in sorted({*range(0, len(data), 97), *range(100), len(data)}):
        path.write_bytes(data[:size])
        said: list[str] = []
        result = replay(path, said.append)
        assert result.difference is None
        assert said in ([], ["cut ends in the middle of a record, as after a kill"])
        assert before <= result.events <= whole.events
        before = result.events
    assert before == whole.events


def test_flipped_bits_are_found_or_end_the_tape_and_never_change_it(
    tmp_path: Path, payloads: list[bytes]
) -> None:
    data = write(tmp_path / "whole", payloads[:6]).read_bytes()
    whole, path = replay(tmp_path / "whole", print), tmp_path / "000001.tape"
    draw = random.Random(1)
    damaged = 0
    for _ in range(500):
        flipped = bytearray(data)
        flipped[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        said: list[str] = []
        try:
            result = replay(path, said.append)
        except DamagedError:
            damaged += 1
        else:
            assert result.difference is None
            assert said
            assert result.events < whole.events
    assert damaged > 100


def test_a_record_of_valid_msgpack_with_anything_in_it_gives_our_errors_only(
    tmp_path: Path, payloads: list[bytes]
) -> None:
    draw, refused = random.Random(2), 0
    for number in range(300):
        changed = [bytearray(payload) for payload in payloads[:3]]
        for payload in changed[draw.randrange(2) :]:
            payload[draw.randrange(len(payload))] = draw.randrange(256)
        path = write(tmp_path / str(number), [bytes(payload) for payload in changed])
        try:
            replay(path, lambda line: None)
        except DamagedError:
            refused += 1
    assert refused > 100


#: `print("unpickled")`, in two protocols
PICKLES = (
    b"cbuiltins\nprint\n(S'unpickled'\ntR.",
    b"\x80\x02cbuiltins\nprint\nX\x09\x00\x00\x00unpickled\x85R.",
)


@pytest.mark.parametrize("evil", PICKLES)
def test_pickled_bytes_are_refused_wherever_they_stand(
    tmp_path: Path, payloads: list[bytes], evil: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "000001.tape").write_bytes(evil)
    write(tmp_path / "header", [evil])
    write(tmp_path / "steps", [payloads[0], evil])
    write(tmp_path / "state", [header_of(SyncerCore(Parameters(), epoch=1), state=evil)])
    for name in ("000001.tape", "header", "steps", "state"):
        assert main(["replay", str(tmp_path / name)]) == 4
    assert "unpickled" not in capsys.readouterr().out


def test_files_of_another_kind_are_refused(tmp_path: Path, payloads: list[bytes]) -> None:
    with pytest.raises(ConfigError, match=r"is no tape: expected a file such as 000001\.tape"):
        replay(write(tmp_path / "journal", payloads, kind="journal"), print)
    with pytest.raises(DamagedError, match="no valid header of a tape"):
        replay(write(tmp_path / "000001.tape", payloads, kind="journal"), print)


def test_a_state_that_only_looks_like_one_gives_our_error(tmp_path: Path) -> None:
    core = SyncerCore(Parameters(), epoch=1)
    core.started_ns = core.rounds.queue = None  # type: ignore[assignment]
    steps = join_steps([encode_step(Step(ev.Ticked(now_ns=1), "?"))])
    with pytest.raises(DamagedError, match="not what a syncer writes"):
        replay(write(tmp_path / "1", [header_of(core), steps]), print)


def test_no_tape_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no tape"):
        replay(tmp_path, print)
    with pytest.raises(ConfigError, match="No such file"):
        replay(tmp_path / "nowhere", print)
