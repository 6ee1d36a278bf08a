from __future__ import annotations

import re
import shutil
import stat
import string
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from diloco_plugin.errors import ConfigError
from diloco_plugin.net import keys
from diloco_plugin.net.keys import (
    check_key_name,
    fingerprint,
    make_learner_keys,
    make_syncer_keys,
    new_pair,
    read_allow_list,
    read_door_keys,
    read_line_keys,
    read_visitor_keys,
)
from tests.keyring import Keyring


@pytest.fixture
def ring(tmp_path: Path) -> Keyring:
    return Keyring(tmp_path)


def test_what_is_made_is_read_again(ring: Keyring) -> None:
    line = ring.line("berlin")
    door = ring.door
    assert door.learners == {line.own.public: "berlin"}
    assert (line.name, line.syncer) == ("berlin", door.own.public)
    assert zmq.curve_public(line.own.secret) == line.own.public
    assert re.fullmatch("[0-9a-f]{16}", fingerprint(door.own.public))
    assert fingerprint(door.own.public) in (ring.syncer / "syncer.pub").read_text()


def test_secrets_are_private_and_shown_by_no_repr(ring: Keyring) -> None:
    folder = ring.learner("berlin")
    for path in (folder / "berlin.key", ring.syncer / "syncer.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    line = ring.line("berlin")
    assert line.own.secret.decode() not in repr(line)
    assert ring.door.own.secret.decode() not in repr(ring.door)


def test_a_key_never_looks_like_a_comment() -> None:
    for _ in range(300):  # one in 43 would
        pair = new_pair()
        assert not pair.public.startswith(b"#")
        assert not pair.secret.startswith(b"#")


def test_nothing_is_ever_overwritten(ring: Keyring) -> None:
    folder = ring.learner("berlin")
    before = {p: p.read_bytes() for p in [*ring.syncer.rglob("*.*"), *folder.rglob("*.*")]
              if p.is_file()}  # fmt: skip
    with pytest.raises(ConfigError, match=r"syncer\.key exists already"):
        make_syncer_keys(ring.syncer)
    with pytest.raises(ConfigError, match=r"syncer\.pub exists already"):  # a learner's machine
        make_syncer_keys(folder)
    with pytest.raises(ConfigError, match=r"berlin\.key exists already"):
        make_learner_keys(folder, "berlin")
    with pytest.raises(ConfigError, match=r"learners\.d/berlin\.pub exists already"):
        make_learner_keys(ring.syncer, "berlin")
    assert {path: path.read_bytes() for path in before} == before
    assert not (ring.syncer / "berlin.key").exists()
    assert not (folder / "syncer.key").exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_secret_that_others_may_read_is_refused_with_the_command(
    ring: Keyring, mode: int
) -> None:
    folder = ring.learner("berlin")
    for path, read in (
        (folder / "berlin.key", lambda: read_line_keys(folder, "berlin")),
        (ring.syncer / "syncer.key", lambda: ring.door),
    ):
        path.chmod(mode)
        with pytest.raises(ConfigError, match=re.escape(f"`chmod 600 {path}`")):
            read()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "holds 0 lines"),
        ("# only a comment\n", "holds 0 lines"),
        ("a" * 39, "has 39 characters instead of 40"),
        ("a" * 41, "has 41 characters instead of 40"),
        ("a" * 40 + "\n" + "a" * 40, "holds 2 lines"),
        ("~" * 40, "characters that no key has"),
        ("#" * 1 + "a" * 39, "holds 0 lines"),
        ("(" + "#" * 39, "characters that no key has"),  # beyond 32 bits
        ("# long\n" * 1000 + "a" * 40, "no file of a key"),
        ("\N{SNOWMAN}" * 40, "characters instead of 40"),
    ],
)
def test_a_malformed_file_is_refused_with_its_path_and_the_reason(
    ring: Keyring, content: str, says: str
) -> None:
    path = ring.syncer / "learners.d" / "berlin.pub"
    path.write_text(content)
    with pytest.raises(ConfigError, match=re.escape(str(path))) as caught:
        read_allow_list(ring.syncer)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_comments_blank_lines_and_line_ends_of_windows_are_read_over(ring: Keyring) -> None:
    line = ring.line("berlin")
    path = ring.syncer / "learners.d" / "berlin.pub"
    path.write_bytes(b"# berlin\r\n\r\n  " + line.own.public + b"\r\n# end")
    assert read_allow_list(ring.syncer) == {line.own.public: "berlin"}


@given(content=st.binary(max_size=60) | st.text("0aZ#~\n ", max_size=60).map(str.encode))
def test_any_bytes_are_a_key_or_a_config_error(content: bytes) -> None:
    try:
        key = keys._parse(Path("x.pub"), content, "copy it again")
    except ConfigError:
        return
    assert len(key) == 40
    assert key in content


@given(name=st.text(max_size=70) | st.text("ab._-/\n", max_size=70))
def test_a_name_is_safe_as_a_file_or_refused(name: str) -> None:
    try:
        check_key_name(name)
    except ConfigError:
        return
    assert set(name) <= set(string.ascii_letters + string.digits + "._-")
    assert 1 <= len(name) <= 64
    assert name[0] not in ".-"
    assert name.lower() != "syncer"


@pytest.mark.parametrize("name", ["syncer", "Syncer", "a/b", "..", "-a", "", "a b", "a\n"])
def test_a_learner_cannot_be_called_that(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"choose another|cannot be the name"):
        make_learner_keys(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_the_only_key_gives_the_name_and_several_are_listed(ring: Keyring) -> None:
    folder = ring.learner("berlin")
    assert read_line_keys(folder, "").name == "berlin"
    make_learner_keys(folder, "tokyo")
    with pytest.raises(ConfigError, match="berlin, tokyo"):
        read_line_keys(folder, "")
    assert read_line_keys(folder, "tokyo").name == "tokyo"
    with pytest.raises(ConfigError, match=r"there are berlin\.key, tokyo\.key"):
        read_line_keys(folder, "paris")


def test_a_missing_key_file_or_folder_is_named_with_the_fix(ring: Keyring, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere does not exist: `diloco keygen`"):
        read_line_keys(tmp_path / "nowhere", "")
    with pytest.raises(ConfigError, match=r"no learner's key .* `diloco keygen NAME --keys"):
        read_line_keys(ring.syncer, "")
    with pytest.raises(ConfigError, match=r"syncer\.key: No such file.*`diloco keygen --keys"):
        read_door_keys(tmp_path / "nowhere")
    folder = ring.learner("berlin")
    (folder / "syncer.pub").unlink()
    with pytest.raises(ConfigError, match=r"syncer\.pub.*copy it from the syncer's machine"):
        read_line_keys(folder, "berlin")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write keys to .*--keys"):
        make_syncer_keys(tmp_path / "file")


def test_one_key_belongs_to_one_name(ring: Keyring) -> None:
    ring.learner("berlin")
    listed = ring.syncer / "learners.d"
    shutil.copy(listed / "berlin.pub", listed / "tokyo.pub")
    with pytest.raises(ConfigError, match=r"tokyo\.pub holds the key of 'berlin' as well"):
        read_allow_list(ring.syncer)


def test_only_files_called_name_pub_are_on_the_list(ring: Keyring) -> None:
    ring.learner("berlin")
    listed = ring.syncer / "learners.d"
    for other in ("README", ".berlin.pub.swp", ".hidden.pub", "berlin.pub~"):
        (listed / other).write_text("nonsense")
    assert set(read_allow_list(ring.syncer).values()) == {"berlin"}
    (listed / "a b.pub").write_text("nonsense")
    with pytest.raises(ConfigError, match="'a b' cannot be the name of a key"):
        read_allow_list(ring.syncer)
    shutil.rmtree(listed)
    listed.mkdir()
    assert read_allow_list(ring.syncer) == {}


def test_a_folder_that_is_not_there_is_no_list_of_nobody(ring: Keyring) -> None:
    listed = ring.syncer / "learners.d"
    listed.rmdir()
    with pytest.raises(ConfigError, match=rf"cannot read {listed}: No such file"):
        read_door_keys(ring.syncer)
    assert read_visitor_keys(ring.syncer, "").name == "syncer"


def test_a_public_key_of_another_syncer_beside_the_secret_is_refused(
    ring: Keyring, tmp_path: Path
) -> None:
    other = Keyring(tmp_path / "other")
    shutil.copy(other.syncer / "syncer.pub", ring.syncer)
    with pytest.raises(ConfigError, match=r"syncer\.pub does not belong to"):
        read_door_keys(ring.syncer)


def test_who_only_looks_takes_any_key_there_is(ring: Keyring) -> None:
    make_learner_keys(ring.syncer, "tokyo")
    make_learner_keys(ring.syncer, "berlin")
    assert read_visitor_keys(ring.syncer, "").name == "syncer"
    folder = ring.learner("paris")
    assert read_visitor_keys(folder, "host-17").name == "paris"
    make_learner_keys(folder, "berlin")
    assert read_visitor_keys(folder, "").name == "berlin"
    assert read_visitor_keys(folder, "paris").name == "paris"


def test_a_libzmq_without_encryption_is_refused(
    ring: Keyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq, "has", lambda what: False)
    for attempt in (new_pair, lambda: ring.door):
        with pytest.raises(ConfigError, match="without encryption"):
            attempt()
