"""A process, or one thread of it, that stands still for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from diloco_plugin.core.parameters import SECOND_NS

if TYPE_CHECKING:
    from diloco_plugin.testing.world import World


class Standstill:
    """What comes in while it stands still waits, and is done in its order when it goes on."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._until_ns = 0
        self._waiting: list[Callable[[], None]] = []
        self._going_on = False
        #: how long it has stood still, all in all
        self.total_ns = 0

    @property
    def now(self) -> bool:
        """Does it stand still?"""
        return self._until_ns > self._world.now_ns

    def begin(self, seconds: float) -> None:
        """It stands still for so long from now on, or longer if it does already."""
        self.total_ns += int(seconds * SECOND_NS)
        self._until_ns = max(self._until_ns, self._world.now_ns + int(seconds * SECOND_NS))

    def holds(self, later: Callable[[], None]) -> bool:
        """Must this wait? Then it is done when its turn comes."""
        if self._going_on or not (self.now or self._waiting):
            return False
        if not self._waiting:
            self._world.at(self._until_ns - self._world.now_ns, self._go_on)
        self._waiting.append(later)
        return True

    def _go_on(self) -> None:
        if self.now:  # it was prolonged
            self._world.at(self._until_ns - self._world.now_ns, self._go_on)
            return
        waiting, self._waiting = self._waiting, []
        self._going_on = True
        for do in waiting:
            do()
        self._going_on = False
