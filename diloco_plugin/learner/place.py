"""A learner's place in a run, as the syncer's Welcome tells it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diloco_plugin.config import parameters_from
from diloco_plugin.core.parameters import Parameters
from diloco_plugin.errors import ConfigError, LayoutError
from diloco_plugin.tensors.layout import Layout, TensorSpec, build_layout, taking_part
from diloco_plugin.wire import messages as msg


@dataclass(frozen=True, slots=True)
class Place:
    """What the syncer told at the door."""

    parameters: Parameters
    layout: Layout
    index: int
    count: int
    run: str


def read_place(
    welcome: msg.Welcome, specs: Sequence[TensorSpec], before: Place | None
) -> Place | str:
    """What a Welcome says to the learner of this model, or what is wrong with it.

    `before`: what it was told last; a learner keeps its layout as long as it lives.
    """
    try:
        parameters = parameters_from(welcome.parameters, source="the syncer", outer=False)
        layout = build_layout(taking_part(specs, parameters.buffers), welcome.fragments)
    except (ConfigError, LayoutError) as error:
        return f"the syncer's welcome cannot be used: {error}"
    if layout.fingerprint != welcome.fingerprint:
        return (
            f"the syncer lays the model out otherwise (fingerprint {welcome.fingerprint[:12]},"
            f" here {layout.fingerprint[:12]}): use the same diloco-plugin version everywhere."
        )
    if before is not None and before.layout.fingerprint != layout.fingerprint:
        return (
            f"the syncer came back with {len(layout.fragments)} fragments instead of"
            f" {len(before.layout.fragments)}: start this learner again to join that run."
        )
    return Place(parameters, layout, welcome.index, welcome.count, welcome.run)
