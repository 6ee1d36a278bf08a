"""The configuration of a syncer, and the address that a learner needs.

A value is taken from the first that has it: flag, environment (``DILOCO_SYNCER_<KEY>``), TOML file,
preset, default. A wrong value is a :class:`ConfigError` that names its source.
"""

from __future__ import annotations

import difflib
import importlib
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from diloco_plugin.advice import advice as advice
from diloco_plugin.core.parameters import PRESETS, Parameters
from diloco_plugin.errors import ConfigError
from diloco_plugin.net.address import Address, require_keys

ENVIRONMENT: Final = "DILOCO_SYNCER"
LOG_LEVELS: Final = ("debug", "info", "warning", "error")

_UNITS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)")
#: Kubernetes sets these by itself in every pod near a service that is called "diloco-syncer".
_NOT_OURS = re.compile(r"(PORT|SERVICE)(_|$)")


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncerConfig:
    """All that ``diloco syncer`` needs to know. Field metadata ``help`` is the CLI's help."""

    bind: str = field(
        default="tcp://127.0.0.1:5555", metadata={"help": "address to listen on for learners"}
    )
    run: str = field(default="main", metadata={"help": "name of the run"})
    steps: int = field(
        default=0, metadata={"help": "T: the run ends at this step (0: when told to stop)"}
    )
    init: str = field(
        default="",
        metadata={
            "help": "start from this safetensors file or folder, or hf://org/name[@revision]"
            " (default: the model of the first learner that joins)"
        },
    )
    export: str = field(
        default="",
        metadata={
            "help": "write the global model to this .safetensors file at the end; in a file called"
            " model.safetensors it can be loaded with from_pretrained(folder)"
        },
    )
    publish: str = field(
        default="",
        metadata={
            "help": "publish the global model to hf://org/name (a repository that does not exist"
            " yet is made, and is public unless your organization's default is private)"
        },
    )
    every: str = field(
        default="",
        metadata={"help": "publish that often, e.g. 30m, 90s or 2h (default: only at the end)"},
    )
    keys: str = field(
        default="",
        metadata={
            "help": "folder of keys (`diloco keygen`): traffic is encrypted, and only those whose"
            " keys are in its learners.d may come in; needed beyond loopback"
        },
    )
    insecure_plaintext: bool = field(
        default=False,
        metadata={"help": "listen beyond loopback without keys: anybody may read and join"},
    )
    tape: str = field(
        default="",
        metadata={
            "help": "record in this directory what happens and what the syncer decides (at most"
            " 1 GiB), for `diloco replay`"
        },
    )
    state: str = field(
        default="",
        metadata={
            "help": "directory in which the run outlives this process: started again with it, the"
            " syncer goes on where it was (default: it forgets)"
        },
    )
    durability: str = field(
        default="commit",
        metadata={
            "help": "commit: on disk before anybody hears of it, no crash takes a merge back;"
            " interval: a crash loses what was merged since the last save; none: saved at an"
            " orderly stop only",
            "choices": ("commit", "interval", "none"),
        },
    )
    interval: str = field(
        default="60s", metadata={"help": "with durability interval: save that often"}
    )
    override: bool = field(
        default=False,
        metadata={"help": "let the few parameters that a run may change differ from its state"},
    )
    log_level: str = field(
        default="info", metadata={"help": "how much to log", "choices": LOG_LEVELS}
    )
    log_format: str = field(
        default="text",
        metadata={"help": "lines of text or of JSON", "choices": ("text", "json")},
    )
    parameters: Parameters = field(default_factory=Parameters)

    def every_seconds(self) -> float:
        """Seconds between two publications; 0 means only at the end."""
        return duration(self.every)

    def _security_problem(self, address: Address) -> str | None:
        if self.keys and self.insecure_plaintext:
            return f"keys={self.keys!r} and insecure_plaintext=True exclude each other: choose one."
        if not self.keys and not self.insecure_plaintext:
            try:
                require_keys(address)
            except ConfigError as error:
                return str(error)
        return None

    def interval_seconds(self) -> float:
        """Seconds between two saves."""
        return duration(self.interval)

    def problem(self) -> str | None:
        """One sentence that says which value is wrong and how to fix it, or None."""
        try:
            address = Address.parse(self.bind)
        except ConfigError as error:
            return f"bind={self.bind!r} is wrong. {error}"
        if problem := self._security_problem(address):
            return problem
        if problem := run_problem(self.run):
            return problem
        if self.steps < 0:
            return f"steps={self.steps} is negative: use 0 to run until told to stop."
        if self.export and not self.export.endswith(".safetensors"):
            return f"export={self.export!r} must end in .safetensors, e.g. 'out/model.safetensors'."
        if self.publish and not re.fullmatch(r"hf://[\w.-]+/[\w.-]+", self.publish):
            return f"publish={self.publish!r} is not a Hub repository: use 'hf://org/name'."
        if self.every and not self.publish:
            return f"every={self.every!r} has nothing to publish to: set publish='hf://org/name'."
        for name, choices in (
            ("log_level", LOG_LEVELS),
            ("log_format", ("text", "json")),
            ("durability", ("commit", "interval", "none")),
        ):
            if getattr(self, name) not in choices:
                return (
                    f"{name}={getattr(self, name)!r} is unknown: use one of {', '.join(choices)}."
                )
        if self.durability != "commit" and not self.state:
            return f"durability={self.durability!r} has nowhere to save to: set state='some/dir'."
        for name in ("every", "interval"):
            try:
                duration(getattr(self, name))
            except ConfigError as error:
                return f"{name}={error}"
        if not self.interval_seconds() > 0.0:
            return f"interval={self.interval!r} is no time: write 60s, 5m or 1h."
        return None


def run_problem(run: str) -> str | None:
    """What is wrong with the name of a run, or None."""
    if re.fullmatch(r"[\w.-]{1,128}", run):
        return None
    return f"run={run!r} is not a name: use 1 to 128 letters, digits, '.', '_' or '-'."


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration and, for every key, where its value came from."""

    config: SyncerConfig
    sources: Mapping[str, str]
    preset: str = ""


def _kinds(record: type) -> dict[str, str]:
    """The declared type of every key of a record, as text."""
    return {f.name: str(f.type) for f in fields(record) if f.name != "parameters"}


PARAMETER_KINDS: Final = _kinds(Parameters)
#: Every key that a file may hold, `preset` aside, with its type.
KINDS: Final = _kinds(SyncerConfig) | PARAMETER_KINDS
_WORDS: Final = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
}


_TRUTH: Final = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(
    ("0", "false", "no", "off"), False
)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that somebody who wrote `word` most likely meant, or None."""
    found = difflib.get_close_matches(word.replace("-", "_").lower(), list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def _unknown(key: str, known: Iterable[str], source: str) -> ConfigError:
    guess = nearest(key, known)
    hint = f"did you mean {guess!r}?" if guess else "`diloco syncer --help` lists the keys."
    return ConfigError(f"unknown key {key!r} in {source}: {hint}")


def _checked(key: str, value: Any, kind: str, source: str) -> Any:
    """The value, if it has exactly the declared type (a whole number may stand for a float)."""
    if kind == "float" and type(value) is int:
        return float(value)
    if kind in _WORDS:
        if type(value).__name__ == kind:
            return value
    elif isinstance(value, dict):
        for name, option in value.items():
            if not isinstance(option, bool | int | float | str | list | tuple):
                raise ConfigError(
                    f"{key}.{name}={option!r} in {source} is neither a number, text, true, false"
                    " nor a list: leave the key out to get the optimizer's own default."
                )
        return {str(name): option for name, option in value.items()}
    expected = _WORDS.get(kind, "a table of keyword arguments")
    raise ConfigError(
        f"{key}={value!r} in {source} is of type {type(value).__name__}: expected {expected}."
    )


def from_text(key: str, text: str, source: str) -> Any:
    """The value of `key` that is written as text in a flag or an environment variable."""
    kind = KINDS[key]
    try:
        match kind:
            case "str":
                return text
            case "int":
                return int(text)
            case "float":
                return float(text)
            case "bool":
                return _TRUTH[text.lower()]
            case _:
                return _checked(key, json.loads(text), kind, source)
    except (ValueError, KeyError):
        expected = _WORDS.get(kind, "a JSON object like '{\"betas\": [0.9, 0.99]}'")
        raise ConfigError(f"{key}={text!r} in {source}: expected {expected}.") from None


def preset_values(preset: str | None, source: str) -> dict[str, Any]:
    """What a named preset sets; raises :class:`ConfigError` for an unknown name."""
    if not preset:
        return {}
    if preset not in PRESETS:
        guess = nearest(preset, PRESETS)
        hint = f"did you mean {guess!r}?" if guess else f"use one of {', '.join(PRESETS)}."
        raise ConfigError(f"unknown preset {preset!r} in {source}: {hint}")
    return dict(PRESETS[preset])


def parameters_from(
    mapping: Mapping[str, Any],
    preset: str | None = None,
    source: str = "the parameters",
    *,
    outer: bool = True,
) -> Parameters:
    """Checked parameters: those of `mapping`, then of the preset, then the defaults.

    `outer=False` leaves the outer optimizer unchecked: learners take no outer steps, and their
    torch may not even have it.

    Raises:
        ConfigError: a key is unknown, or a value has the wrong type or is out of range.
    """
    for key in mapping:
        if key not in PARAMETER_KINDS:
            raise _unknown(key, PARAMETER_KINDS, source)
    given = {
        key: _checked(key, value, PARAMETER_KINDS[key], source) for key, value in mapping.items()
    }
    values = preset_values(preset, source) | given
    return _parameters(values, dict.fromkeys(given, source), outer=outer)


def _parameters(
    values: dict[str, Any], sources: Mapping[str, str], *, outer: bool = True
) -> Parameters:
    """Parameters of values whose types are right; ranges and outer optimizer are checked."""
    every = values.get("sync_every", Parameters.__dataclass_fields__["sync_every"].default)
    if "fragments" not in values and every < 24:
        values = values | {"fragments": every}  # more than one a step there cannot be
    parameters = Parameters(**values)
    _raise_for(parameters.problem(), sources)
    if not outer:
        return parameters
    # Late: it needs torch, which `diloco --help` and `diloco status` can do without.
    from diloco_plugin.tensors.outer import check_outer

    try:
        check_outer(
            parameters.outer_optimizer,
            parameters.outer_lr,
            parameters.outer_momentum,
            parameters.outer_nesterov,
            parameters.outer_options,
        )
    except ConfigError as error:
        origin = _origin("outer_optimizer outer_lr outer_momentum outer_options", sources)
        raise ConfigError(f"{str(error).removesuffix('.')}{origin}.") from None
    return parameters


def _origin(text: str, sources: Mapping[str, str]) -> str:
    """Says where the keys that `text` names were set, for those that somebody did set."""
    named = [
        f"{key} is set by {sources[key]}"
        for key in dict.fromkeys(re.findall(r"[a-z_]+", text))
        if sources.get(key, "default") != "default"
    ]
    return f" ({'; '.join(named)})" if named else ""


def _raise_for(problem: str | None, sources: Mapping[str, str]) -> None:
    if problem:
        origin = _origin(" ".join(re.findall(r"(\w+)=", problem)), sources)
        raise ConfigError(f"{problem.removesuffix('.')}{origin}.")


def parameters_to(parameters: Parameters) -> dict[str, Any]:
    """A plain tree that :func:`parameters_from` turns back into equal parameters."""
    return asdict(parameters)


def load_toml(path: str | Path) -> dict[str, Any]:
    """The keys of a TOML file: flat, but for the one table ``[outer_options]``.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or holds an unknown key or a wrong type.
    """
    # tomllib came with Python 3.11.
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        raw: dict[str, Any] = toml.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}. Check --config.") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deep. Correct it there.") from None
    except ValueError as error:  # also wrong UTF-8
        raise ConfigError(f"{path} is not TOML: {error}. Correct it there.") from None
    known = KINDS | {"preset": "str"}
    for key in raw:
        if key not in known:
            raise _unknown(key, known, str(path))
    return {key: _checked(key, value, known[key], str(path)) for key, value in raw.items()}


def _from_environment(environ: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    prefix = f"{ENVIRONMENT}_"
    for name in sorted(environ):
        bare = name.removeprefix(prefix)
        if bare == name or _NOT_OURS.match(bare):
            continue
        key, source = bare.lower(), f"environment variable {name}"
        if key != "preset" and key not in KINDS:
            guess = nearest(key, [*KINDS, "preset"])
            hint = f"did you mean {prefix}{guess.upper()}?" if guess else "unset it."
            raise ConfigError(f"unknown {source}: {hint}")
        values[key] = environ[name] if key == "preset" else from_text(key, environ[name], source)
        sources[key] = source
    return values, sources


def resolve(
    flags: Mapping[str, Any], environ: Mapping[str, str], file: str | Path | None = None
) -> Resolved:
    """One configuration out of flags (keys with typed values), environment, file, preset, defaults.

    Raises:
        ConfigError: something is wrong; the sentence says what, where, and how to fix it.
    """
    values, sources = _from_environment(environ)
    if file is not None:
        content = load_toml(file)
        values = content | values
        sources = dict.fromkeys(content, str(file)) | sources
    values |= flags
    sources |= {key: f"flag --{key.replace('_', '-')}" for key in flags}

    preset = values.pop("preset", "")
    preset_source = sources.pop("preset", "default")
    implied = preset_values(preset, preset_source)
    values = implied | values
    sources = dict.fromkeys(implied, f"preset {preset} ({preset_source})") | sources
    sources = dict.fromkeys(KINDS, "default") | sources

    parameters = _parameters({k: v for k, v in values.items() if k in PARAMETER_KINDS}, sources)
    own = {key: value for key, value in values.items() if key not in PARAMETER_KINDS}
    config = SyncerConfig(**own, parameters=parameters)
    _raise_for(config.problem(), sources)
    return Resolved(config, sources, preset)


def duration(text: str) -> float:
    """Seconds in a duration such as ``90s``, ``30m``, ``1.5h`` or ``2d``; empty is 0."""
    if not text:
        return 0.0
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None:
        raise ConfigError(f"{text!r} is not a duration: write 90s, 30m, 1.5h or 2d.")
    return float(match[1]) * _UNITS[match[2]]


def default_address(address: str | None = None) -> str:
    """The address of the syncer: the given one, else that in ``DILOCO_SYNCER``.

    Raises:
        ConfigError: there is neither, or it is not an address.
    """
    found = address or os.environ.get(ENVIRONMENT, "")
    if not found:
        raise ConfigError(
            "no syncer address: none was given and the environment variable DILOCO_SYNCER is not"
            " set. Pass one such as 'tcp://syncer:5555', or set DILOCO_SYNCER to it."
        )
    try:
        Address.parse(found)
    except ConfigError as error:
        origin = "" if address else " It comes from the environment variable DILOCO_SYNCER."
        raise ConfigError(f"{error}{origin}") from None
    return found
