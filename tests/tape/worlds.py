"""Eventful simulated runs, the same for the same seed."""

from __future__ import annotations

import random
from typing import Any

from diloco_plugin.core.parameters import Parameters
from diloco_plugin.testing import World


def eventful(seed: int, turns: int = 40, *, lockstep: bool = False, **world: Any) -> World:
    """Learners come, go, break and return; `world` are further arguments of World."""
    draw = random.Random(seed)
    fragments = draw.randint(1, 5)
    parameters = Parameters(
        fragments=fragments,
        sync_every=fragments + 4,
        overlap=draw.randint(0, 3),
        quorum=draw.randint(1, 3),
        lockstep=lockstep,
        learners=2 if lockstep else 0,
        lease=4.0,
        close_timeout=10.0,
    )
    steps = draw.choice((0, 300))
    durable = draw.random() < 0.5
    one = World(parameters, fragments=fragments, seed=seed, steps=steps, durable=durable, **world)
    for _ in range(turns):
        happen(one, draw, ("a", "b") if lockstep else ("a", "b", "c", "d"))
        one.run(draw.choice((0.05, 0.3, 1.0, 6.0)))
    return one


def happen(world: World, draw: random.Random, names: tuple[str, ...]) -> None:
    """Something happens to somebody."""
    name = draw.choice(names)
    learner = world.learners.get(name)
    if learner is None:
        steps = draw.choice((None, 30))
        world.learner(name, step_ms=draw.choice((10.0, 40.0, 100.0)), steps=steps)
        return
    match draw.choice(("crash", "cut", "mend", "pause", "go on", "finish", "nan", "explode",
                       "corrupt", "rival", "restart", "disk", "none", "none")):  # fmt: skip
        case "crash":
            world.crash(name)
        case "cut":
            world.cut(name, silent=draw.random() < 0.5)
        case "mend":
            world.mend(name)
        case "pause" | "go on" as what:
            learner.paused = what == "pause"
        case "finish":
            learner.finish()
        case "nan":
            learner.finite = not learner.finite
        case "explode":
            learner.norm = 1e6 if learner.norm == 1.0 else 1.0
        case "corrupt":
            learner.corrupt = 2
        case "rival" if f"{name}'" not in world.learners:
            world.learner(learner.life.name, step_ms=50, label=f"{name}'")
        case "restart":
            world.restart_syncer()
        case "disk":
            world.disk_full = True
            world.run(1.0)
            world.disk_full = False
