"""What a published model needs beside its weights: the JSON of its configuration.

Knows the shape of Hugging Face models and PEFT adapters by duck typing, so that neither has to be
installed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any, cast

from torch import nn


def model_config_json(model: nn.Module) -> str:
    """The configuration that ``save_pretrained`` would write for this model; "" if it has none.

    That of the adapter for a PEFT model, since only the adapter is trained together.
    """
    try:
        return _adapter_config(model) or _transformers_config(model)
    except (TypeError, ValueError, AttributeError, KeyError):
        return ""  # a model that looks like one of theirs only; its weights matter more


def _transformers_config(model: nn.Module) -> str:
    config = getattr(model, "config", None)
    to_json = getattr(config, "to_json_string", None)
    if not callable(to_json):
        return ""
    values = json.loads(to_json())
    # Only save_pretrained notes the class; without it nobody knows which one to load.
    values["architectures"] = [type(model).__name__]
    return json.dumps(values, indent=2, sort_keys=True)


def _adapter_config(model: nn.Module) -> str:
    configs = getattr(model, "peft_config", None)
    # A transformers model has this attribute as well once an adapter was added by add_adapter(),
    # and there too its other weights are frozen.
    if not isinstance(configs, Mapping) or not configs:
        return ""
    active = getattr(model, "active_adapter", None)
    name = active if isinstance(active, str) and active in configs else next(iter(configs))
    config = cast(Any, configs[name])
    values = dict(config.to_dict())
    values["inference_mode"] = True  # as save_pretrained writes it: loaded adapters are frozen
    if values.get("base_model_name_or_path") is None:
        base = getattr(getattr(model, "config", None), "_name_or_path", None)
        values["base_model_name_or_path"] = base or None
    return json.dumps(values, indent=2, sort_keys=True, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f"{value!r} has no place in JSON")
