"""The command `diloco`: start a syncer, look at one, check it, repair its state; keys, tapes.

Exit codes: 0 done, 1 a replay differs, 2 wrong usage, 4 damaged, 69 unreachable, 70 the self-probe
failed, 74 the disk, 75 address in use, 77 refused, 78 configuration.
Nothing heavy is imported before a command needs it: ``diloco --help`` answers without torch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, Final, NoReturn

from diloco_plugin._version import __version__
from diloco_plugin.config import (
    KINDS,
    Resolved,
    SyncerConfig,
    default_address,
    from_text,
    nearest,
    parameters_to,
    resolve,
)
from diloco_plugin.core.parameters import PRESETS, Parameters
from diloco_plugin.errors import ConfigError, DiLoCoError, RefusedError, UnreachableError

USAGE_ERROR: Final = 2

_SYNCER: Final = """\
Start the daemon that owns the global model. It needs no GPU. Every option can also be set in a TOML
file (--config) or as DILOCO_SYNCER_<KEY>; a flag beats the environment, that the file, that the
preset. `--print-config` shows the outcome and where each value came from."""


_STATUS: Final = """\
Show a running syncer: who is there, how far, and what is wrong. Counts are since it was started.
joined: rounds that have merged the learner's progress, of those that asked for it; tokens: its work
(samples, where its batches have no input_ids); lease: given up without a sign of life for so long.
All of it: docs/operations.md."""


_KEYGEN: Final = """\
Make the keys of a syncer, or of the learner NAME. They encrypt what travels, and the syncer lets in
only those whose NAME.pub is in its learners.d. Nothing is ever overwritten."""


_REPAIR: Final = """\
Say what is damaged in the state directory of a syncer that is not running, and what can be done.
Nothing is changed without --write or --from-learners, and no announced version is given up without
--accept-loss."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; errors are one line on standard error."""
    try:
        arguments, unknown = _parser().parse_known_args(argv)
        if unknown:
            return _complain(_unknown_argument(unknown[0], arguments), USAGE_ERROR)
        run: Callable[[argparse.Namespace], int] = arguments.command_function
        code = run(arguments)
        sys.stdout.flush()
        return code
    except DiLoCoError as error:
        return _complain(str(error), error.exit_code)
    except SystemExit as stop:  # argparse, for --help and for wrong usage
        return stop.code if isinstance(stop.code, int) else USAGE_ERROR
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (`| head`) has left. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _complain(text: str, code: int) -> int:
    from diloco_plugin.status import printable

    sys.stderr.write(f"diloco: {printable(' '.join(text.split()))}\n")
    return code


class _Parser(argparse.ArgumentParser):
    """Argparse whose complaint is one line, without the list of all flags."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"diloco: {message}. Try `{self.prog} --help`.\n")


def _parser() -> argparse.ArgumentParser:
    # Abbreviated flags would break when a new flag makes them ambiguous.
    parser = _Parser(
        prog="diloco",
        description="Start a syncer, look at one, check that it can be reached.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    syncer = commands.add_parser(
        "syncer", help="start a syncer", description=_SYNCER, allow_abbrev=False
    )
    _add_syncer_flags(syncer)
    syncer.set_defaults(command_function=_syncer, command_parser=syncer)

    status = commands.add_parser(
        "status", help="show a running syncer", description=_STATUS, allow_abbrev=False
    )
    _add_address(status)
    status.add_argument("--json", action="store_true", help="print the status as JSON")
    status.add_argument("--watch", action="store_true", help="print it every two seconds")
    status.set_defaults(command_function=_status, command_parser=status)

    check = commands.add_parser("check", help="can this machine join a run?", allow_abbrev=False)
    _add_address(check)
    check.add_argument(
        "--name", help="of the learner, where there are keys of several (default: DILOCO_NAME)"
    )
    check.set_defaults(command_function=_check, command_parser=check)

    keygen = commands.add_parser(
        "keygen", help="make keys", description=_KEYGEN, allow_abbrev=False
    )
    keygen.add_argument(
        "name", nargs="?", metavar="NAME", help="of a learner (default: the syncer)"
    )
    keygen.add_argument(
        "--keys", metavar="DIR", help="folder (default: DILOCO_KEYS, else ~/.config/diloco)"
    )
    keygen.set_defaults(command_function=_keygen, command_parser=keygen)

    replay = commands.add_parser(
        "replay", help="recompute what a syncer decided, from its tape", allow_abbrev=False
    )
    replay.add_argument("path", metavar="PATH", help="directory given with --tape, or one file")
    replay.set_defaults(command_function=_replay, command_parser=replay)

    repair = commands.add_parser(
        "repair",
        help="look at a damaged state, and repair it",
        description=_REPAIR,
        allow_abbrev=False,
    )
    _add_repair_flags(repair)
    repair.set_defaults(command_function=_repair, command_parser=repair)

    version = commands.add_parser("version", help="print the version", allow_abbrev=False)
    version.set_defaults(command_function=_version, command_parser=version)
    return parser


def _add_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "address",
        nargs="?",
        metavar="ADDRESS",
        help="of the syncer, e.g. tcp://syncer:5555 (default: DILOCO_SYNCER from the environment)",
    )
    parser.add_argument(
        "--keys",
        metavar="DIR",
        help="folder of keys, or insecure-plaintext (default: DILOCO_KEYS, else ~/.config/diloco)",
    )


def _add_repair_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--state", metavar="DIR", required=True, help="as given to the syncer")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--write", action="store_true", help="go on from what is intact")
    ways.add_argument(
        "--from-learners", action="store_true", help="take back what is lost from learners"
    )
    parser.add_argument(
        "--accept-loss",
        action="store_true",
        help="give announced versions up for older ones where nothing else is left",
    )
    parser.add_argument(
        "--bind", metavar="ADDRESS", default="", help="where the syncer listened for learners"
    )
    parser.add_argument("--keys", metavar="DIR", default="", help="folder of the syncer's keys")
    parser.add_argument(
        "--insecure-plaintext", action="store_true", help="listen beyond loopback without keys"
    )
    parser.add_argument("--wait", metavar="TIME", default="10m", help="for learners (default: 10m)")


def _add_syncer_flags(parser: argparse.ArgumentParser) -> None:
    """One flag for every field of SyncerConfig and of Parameters."""
    daemon = parser.add_argument_group("daemon")
    daemon.add_argument("--config", metavar="FILE", help="TOML file with any of these options")
    daemon.add_argument(
        "--print-config", action="store_true", help="print the configuration as TOML and exit"
    )
    for item in fields(SyncerConfig):
        if item.name != "parameters":
            _add_flag(daemon, item)
    algorithm = parser.add_argument_group("algorithm, the same for all learners")
    algorithm.add_argument(
        "--preset", choices=list(PRESETS), default=argparse.SUPPRESS, help="named starting point"
    )
    for parameter in fields(Parameters):
        _add_flag(algorithm, parameter)


def _add_flag(group: argparse._ArgumentGroup, item: Field[Any]) -> None:
    flag = f"--{item.name.replace('_', '-')}"
    text = item.metadata.get("help", "").replace("%", "%%")
    kind = KINDS[item.name]
    if kind != "dict[str, Any]" and item.default not in ("", False):
        text += f" (default: {item.default})"
    # SUPPRESS: the namespace holds only what was given, so that other sources fill the rest.
    if kind == "bool":
        action = argparse.BooleanOptionalAction
        group.add_argument(flag, action=action, default=argparse.SUPPRESS, help=text)
        return
    group.add_argument(
        flag,
        type=_typed(item.name, flag),
        choices=item.metadata.get("choices"),
        metavar=None if "choices" in item.metadata else _metavar(kind),
        default=argparse.SUPPRESS,
        help=text,
    )


def _typed(key: str, flag: str) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return from_text(key, text, f"flag {flag}")
        except ConfigError as error:
            expected = str(error).rpartition(": ")[2].removesuffix(".")
            raise argparse.ArgumentTypeError(f"{text!r}: {expected}") from None

    return convert


def _metavar(kind: str) -> str:
    return {"int": "N", "float": "X", "str": "TEXT"}.get(kind, "JSON")


def _unknown_argument(word: str, arguments: argparse.Namespace) -> str:
    """What to say about an argument that the chosen command does not have."""
    parser: argparse.ArgumentParser = arguments.command_parser
    if not word.startswith("-"):
        return f"unexpected argument {word!r}. Try `{parser.prog} --help`."
    flags = {o.lstrip("-").replace("-", "_"): o for a in parser._actions for o in a.option_strings}
    bare = word.split("=")[0].lstrip("-")
    guess = nearest(bare, flags)
    hint = f"did you mean {flags[guess]}?" if guess else f"`{parser.prog} --help` lists the flags."
    return f"unknown flag {word.split('=')[0]}: {hint}"


def _syncer(arguments: argparse.Namespace) -> int:
    flags = {key: value for key, value in vars(arguments).items() if key in {*KINDS, "preset"}}
    resolved = resolve(flags, os.environ, arguments.config)
    if arguments.print_config:
        sys.stdout.write(to_toml(resolved))
        return 0
    from diloco_plugin.syncer import serve

    given = {key for key, source in resolved.sources.items() if source != "default"}
    return serve(resolved.config, given)


def _status(arguments: argparse.Namespace) -> int:
    from diloco_plugin.status import show

    address = default_address(arguments.address)
    return show(address, keys=arguments.keys, as_json=arguments.json, watch=arguments.watch)


def _check(arguments: argparse.Namespace) -> int:
    from diloco_plugin.status import check

    try:
        sentence = check(default_address(arguments.address), arguments.keys, name=arguments.name)
    except (RefusedError, UnreachableError) as error:
        sys.stdout.write(f"no: {error}\n")
        return error.exit_code
    sys.stdout.write(f"yes: {sentence}\n")
    return 0


def _keygen(arguments: argparse.Namespace) -> int:
    from diloco_plugin.credentials import key_folder
    from diloco_plugin.net.keys import make_learner_keys, make_syncer_keys

    folder, name = key_folder(arguments.keys), arguments.name
    if name is None:
        make_syncer_keys(folder)
        lines = [
            f"{folder}/syncer.key stays here: diloco syncer --keys {folder} --bind tcp://0.0.0.0:5555",
            f"{folder}/syncer.pub goes to every learner's machine, into its folder of keys",
        ]
    else:
        make_learner_keys(folder, name)
        lines = [
            f"{folder}/{name}.key goes to (or stays on) the machine of learner {name}, beside"
            " syncer.pub, and nowhere else",
            f"{folder}/learners.d/{name}.pub goes into learners.d on the syncer's machine; then"
            " send a running syncer SIGHUP",
        ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    from diloco_plugin.status import printable
    from diloco_plugin.tape.replay import show

    return show(Path(arguments.path), lambda line: print(printable(line)))


def _repair(arguments: argparse.Namespace) -> int:
    if arguments.accept_loss and not (arguments.write or arguments.from_learners):
        arguments.command_parser.error("--accept-loss goes with --write or --from-learners")
    if arguments.from_learners and not arguments.bind:
        arguments.command_parser.error("--from-learners needs --bind ADDRESS")
    from diloco_plugin.status import printable
    from diloco_plugin.syncer.repairing import Options, repair

    values = vars(arguments)
    options = Options(**{item.name: values[item.name] for item in fields(Options)})
    return repair(options, lambda line: print(printable(line), flush=True))


def _version(arguments: argparse.Namespace) -> int:
    sys.stdout.write(f"diloco-plugin {__version__}\n")
    return 0


def to_toml(resolved: Resolved) -> str:
    """A TOML file that gives the same configuration again, with the source of each key."""
    config = resolved.config
    tree = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "parameters"}
    tree |= parameters_to(config.parameters)
    options = tree.pop("outer_options")
    lines = [f"# preset {resolved.preset!r} is already applied below"] if resolved.preset else []
    for key, value in tree.items():
        lines.append(f"{f'{key} = {_toml(value)}':<40}  # {resolved.sources[key]}")
    lines += ["", f"{'[outer_options]':<40}  # {resolved.sources['outer_options']}"]
    lines += [f"{_toml(key)} = {_toml(value)}" for key, value in options.items()]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            # JSON's escapes are TOML's, but for DEL, which only TOML wants escaped.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return f"[{', '.join(_toml(item) for item in value)}]"
        case _:
            return repr(value)


if __name__ == "__main__":
    sys.exit(main())
