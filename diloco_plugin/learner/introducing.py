"""What a learner says about itself at the door, checked before anything is said.

A syncer drops a Hello that it cannot decode without an answer, and libzmq drops one that is too
large together with the connection: both have to be noticed here.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Final

from diloco_plugin.config import run_problem
from diloco_plugin.core import actions as act
from diloco_plugin.describing import describe
from diloco_plugin.errors import ConfigError, LayoutError, WireError
from diloco_plugin.learner.naming import check_name
from diloco_plugin.tensors.layout import TensorSpec
from diloco_plugin.wire import messages as msg
from diloco_plugin.wire.framing import decode_model, decode_to_syncer, encode

log = logging.getLogger("diloco.learner")

#: The largest of the numbers that a Hello counts with: later ones must fit as well.
_COUNT_MAX: Final = 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """What a learner says about itself in every Hello."""

    run: str
    name: str
    incarnation: str
    specs: tuple[TensorSpec, ...]
    data_seed: int | None
    model_config: str
    version: str

    def hello(self, action: act.SayHello) -> msg.Hello:
        """The message that introduces this learner."""
        return msg.Hello(
            protocol=msg.PROTOCOL,
            run=self.run,
            name=self.name,
            incarnation=self.incarnation,
            tensors=describe(self.specs),
            epoch=action.epoch,
            versions=action.versions,
            clock=action.clock,
            data_seed=self.data_seed,
            model_config=self.model_config,
            version=self.version,
            wants_state=action.wants_state,
        )


def checked(me: Introduction) -> Introduction:
    """The introduction, fit to be sent, now and when this learner comes back.

    Raises:
        ConfigError: a name, or another argument, is such that no syncer would read it.
        LayoutError: the description of the model is too large.
    """
    check_name(me.name)
    if me.run and (problem := run_problem(me.run)):
        raise ConfigError(problem)
    if me.data_seed is not None and not -(2**63) <= me.data_seed < 2**64:
        raise ConfigError(f"data_seed={me.data_seed} does not fit into 64 bits: use a smaller one.")
    size = len(me.model_config.encode(errors="replace"))
    if size > msg.MODEL_CONFIG_BYTES_MAX:
        log.warning(
            "the model's configuration is too long (%d bytes, at most %d): it is left out, and the"
            " published model will lack its config.json. Pass a shorter one as model_config.",
            size,
            msg.MODEL_CONFIG_BYTES_MAX,
        )
        me = replace(me, model_config="")
    versions = (_COUNT_MAX,) * min(msg.FRAGMENTS_MAX, len(me.specs))
    longest = act.SayHello(epoch=_COUNT_MAX, versions=versions, clock=_COUNT_MAX)
    try:
        hello = me.hello(longest)
        decode_to_syncer(encode(hello))
        decode_model(hello.tensors)
    except WireError as error:
        if error.reason == "oversize":
            raise LayoutError(str(error)) from None
        raise ConfigError(
            f"no syncer would read what this learner says about itself: {error} Correct the name"
            " of the tensor, or the argument of attach(), that this is about."
        ) from None
    return me
