"""The global model on disk: safetensors in, safetensors out. Nothing is ever unpickled.

Tied weights appear once, under their owner's name; loaders tie them again. Written names are those
of the run's layout, but for PEFT adapters, whose files leave out the name of the adapter.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from diloco_plugin.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

SHARD_BYTES_MAX: Final = 5 * 10**9
_INDEX: Final = "model.safetensors.index.json"
_WEIGHTS: Final = ("model.safetensors", "adapter_model.safetensors")
_LORA = re.compile(r"(^|\.)(lora_(?:A|B|E|embedding_A|embedding_B|magnitude_vector))(?=\.|$)")
_LORA_NAMED = re.compile(_LORA.pattern.removesuffix(r"(?=\.|$)") + r"\.([^.]+)(?=\.|$)")


def load_init(source: str, hub_token: str | None = None) -> dict[str, Tensor]:
    """The tensors of a model, by name, from a safetensors file, a folder, or ``hf://org/name[@rev]``.

    A folder holds ``model.safetensors``, its sharded form with an index, a PEFT adapter, or exactly
    one other safetensors file.

    Raises:
        ConfigError: there is no such model; the message says what was found instead.
        UnreachableError: the Hub did not answer.
    """
    if source.startswith("hf://"):
        from diloco_plugin import hub

        return load_init(str(hub.download(*hub.parse(source), token=hub_token)))
    path = Path(source)
    if path.is_dir():
        return _load_folder(path)
    if not path.exists():
        raise ConfigError(
            f"init: {source} does not exist. Give a .safetensors file, a folder with one, or"
            " hf://org/name."
        )
    return _load_file(path)


def _load_folder(folder: Path) -> dict[str, Tensor]:
    if (folder / _INDEX).is_file():
        return _load_shards(folder)
    for name in _WEIGHTS:
        if (folder / name).is_file():
            return _load_file(folder / name)
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return _load_file(files[0])
    found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
    raise ConfigError(
        f"init: {folder} holds neither model.safetensors nor {_INDEX}, but {found}. Save the model"
        " with save_pretrained, or name one .safetensors file."
    )


def _load_shards(folder: Path) -> dict[str, Tensor]:
    """All shards that the index names; each must be a plain file name inside the folder."""
    index = folder / _INDEX
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = dict(weight_map)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"init: {index} is not an index of shards ({error!r}). Save the model again."
        ) from None
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(map(str, names.values()))):
        # An index from elsewhere must not make us read files outside its folder.
        if Path(shard).name != shard or not (folder / shard).is_file():
            raise ConfigError(f"init: {index} names {shard!r}, which is not in {folder}.")
        tensors |= _load_file(folder / shard)
    missing = sorted(set(names) - set(tensors))
    if missing:
        raise ConfigError(
            f"init: {len(missing)} tensors of {index}, first {missing[0]!r}, are in none of its"
            " shards. The folder is incomplete: copy or download it again."
        )
    return tensors


def _load_file(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(str(path))
    except SafetensorError as error:
        raise ConfigError(
            f"init: {path} is {_looks_like(path)}, not a safetensors file ({error}). Save it as one"
            " (model.save_pretrained, or safetensors.torch.save_file)."
        ) from None
    except OSError as error:
        raise ConfigError(f"init: cannot read {path}: {error.strerror or error}.") from None
    if not tensors:
        raise ConfigError(f"init: {path} holds no tensors. Give the file of a whole model.")
    if path.name == "adapter_model.safetensors":
        # PEFT's files leave out the adapter's name, which the parameters of a model have.
        return {_LORA.sub(r"\1\2.default", name): tensor for name, tensor in tensors.items()}
    return tensors


def _looks_like(path: Path) -> str:
    """What a file that is no safetensors file seems to be."""
    with path.open("rb") as file:
        head = file.read(64)
    if head.startswith((b"PK", b"\x80")):
        return "a pickled PyTorch checkpoint (which is never unpickled here)"
    if head.startswith(b"GGUF"):
        return "a GGUF file"
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer (run `git lfs pull`)"
    return "something else" if head else "empty"


def write_model(
    path: str | Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    config_json: str = "",
) -> None:
    """Writes one safetensors file atomically and durably, and the model's config beside it.

    The config is called ``config.json`` when the file is called ``model.safetensors``, so that
    ``from_pretrained(folder)`` works, and ``<stem>.config.json`` otherwise. The tensors may be
    views of larger ones that do not overlap; they must not change during the call.

    Raises:
        OSError: the disk did not take it; an older file at `path` is then untouched.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _replacing(path) as temporary:
        _save(temporary, tensors, metadata)
    config = _valid_config(config_json)
    if config:
        beside = path.with_name(f"{path.stem}.config.json")
        if path.name == "model.safetensors" and _may_replace(path.with_name("config.json")):
            beside = path.with_name("config.json")
        with _replacing(beside) as temporary:
            temporary.write_text(config_json, encoding="utf-8")


def write_folder(
    folder: str | Path,
    tensors: Mapping[str, Tensor],
    config_json: str = "",
    shard_bytes_max: int = SHARD_BYTES_MAX,
) -> None:
    """Writes a folder that ``from_pretrained`` loads, replacing an older one by rename.

    A PEFT adapter (its config has ``peft_type``) becomes ``adapter_model.safetensors`` and
    ``adapter_config.json``. Whoever looks sees the old folder or the new one, or for an instant
    none, but never a mixture.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside it, as a rename does not cross file systems.
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        fresh.chmod(0o755)
        config = _valid_config(config_json)
        if "peft_type" in config:
            write_model(fresh / "adapter_model.safetensors", adapter_tensors(tensors))
            (fresh / "adapter_config.json").write_text(config_json, encoding="utf-8")
        else:
            _write_shards(fresh, tensors, shard_bytes_max)
            if config:
                (fresh / "config.json").write_text(config_json, encoding="utf-8")
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        fresh.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _write_shards(folder: Path, tensors: Mapping[str, Tensor], shard_bytes_max: int) -> None:
    """`model.safetensors`, or numbered shards of bounded size and their index.

    Not by huggingface_hub's own splitter: it takes views of one flat buffer for tied weights.
    """
    shards: list[dict[str, Tensor]] = [{}]
    filled = total = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if shards[-1] and filled + size > shard_bytes_max:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += size
        total += size
    if len(shards) == 1:
        write_model(folder / "model.safetensors", shards[0])
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_model(folder / file, shard)
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / _INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def adapter_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a PEFT adapter under the names of its file: without the adapter's name."""
    named = [match[3] for name in tensors if (match := _LORA_NAMED.search(name))]
    part = f".{named[0] if named else 'default'}"
    result = {}
    for name, tensor in tensors.items():
        bare = name.replace(".modules_to_save", "") if ".modules_to_save." in name else name
        result[re.sub(rf"{re.escape(part)}(?=\.|$)", "", bare)] = tensor
    return result


def _save(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(whole, str(path), metadata={"format": "pt", **(metadata or {})})
    except SafetensorError as error:  # also for a full disk
        raise OSError(f"cannot write {path}: {error}") from error
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)  # safetensors makes it readable by its owner only


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, which replaces it durably when the block succeeds."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _valid_config(config_json: str) -> dict[str, Any]:
    """The config that a learner sent, parsed; empty, and said so, if it is not a JSON object."""
    if not config_json:
        return {}
    try:
        config = json.loads(config_json)
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        # The model matters more than its config: it is written in any case.
        _log.warning("the config that a learner sent is not a JSON object; writing none")
        return {}
    return config


def _may_replace(config: Path) -> bool:
    """Whether a config.json that is already there is one of a model, or none is there."""
    try:
        found = json.loads(config.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return True
    except (OSError, ValueError, RecursionError):
        found = None
    if isinstance(found, dict) and found.keys() & {"model_type", "architectures"}:
        return True
    _log.warning("%s is not a model's config and stays; writing model.config.json", config)
    return False
