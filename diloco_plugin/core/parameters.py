"""The parameters of a run: one frozen record, owned by the syncer, told to learners at the door.

Defaults are those of the paper's run where it publishes them (arXiv 2604.21428, section 4); it does
not publish its outer optimizer. SGD with lr 0.7 and Nesterov momentum 0.5 is what a small real
language model asked for: with the lineage's 0.9 the merged model was no better than one process
after 62 rounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

SECOND_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Everything that syncer and learners must agree on. The metadata ``help`` is the CLI's."""

    sync_every: int = field(
        default=24, metadata={"help": "H: steps between two syncs of the same fragment"}
    )
    fragments: int = field(default=24, metadata={"help": "P: number of fragments, at most H"})
    overlap: int = field(
        default=2, metadata={"help": "tau: steps that one fragment exchange may take"}
    )
    quorum: int = field(default=1, metadata={"help": "K: pushes that a round needs"})
    grace: float = field(
        default=0.8,
        metadata={"help": "gamma: share of the hidden time spent waiting for stragglers"},
    )
    alpha: float = field(
        default=0.0,
        metadata={"help": "share of the local value kept when a fragment arrives; 0 overwrites"},
    )
    merge: str = field(
        default="rda", metadata={"help": "rda or direct", "choices": ("rda", "direct")}
    )
    outer_optimizer: str = field(
        default="SGD",
        metadata={"help": "name of any torch.optim optimizer, used as outer optimizer"},
    )
    outer_lr: float = field(default=0.7, metadata={"help": "learning rate of the outer optimizer"})
    outer_momentum: float = field(default=0.5, metadata={"help": "momentum of outer SGD"})
    outer_nesterov: bool = field(default=True, metadata={"help": "Nesterov momentum in outer SGD"})
    outer_options: dict[str, Any] = field(
        default_factory=dict,
        metadata={"help": "further keyword arguments of the outer optimizer (TOML table or JSON)"},
    )
    codec: str = field(
        default="fp32",
        metadata={"help": "how fragments travel: fp32 or bf16", "choices": ("fp32", "bf16")},
    )
    buffers: str = field(
        default="merge",
        metadata={
            "help": "floating-point buffers (BatchNorm): merge or local",
            "choices": ("merge", "local"),
        },
    )
    max_staleness: int = field(
        default=2,
        metadata={
            "help": "versions that a push's base may be behind before it is refused as stale"
        },
    )
    norm_guard: float = field(
        default=10.0,
        metadata={"help": "a push is refused beyond this multiple of the fragment's usual norm"},
    )
    lockstep: bool = field(
        default=False,
        metadata={"help": "wait for everybody: reproducible, for baselines and debugging"},
    )
    learners: int = field(
        default=0,
        metadata={
            "help": "expected number of learners: shards data; required by lockstep (0: unknown)"
        },
    )
    lease: float = field(
        default=15.0, metadata={"help": "seconds of silence after which a learner counts as gone"}
    )
    close_timeout: float = field(
        default=30.0,
        metadata={"help": "seconds that a finishing learner waits for its closing rounds"},
    )

    def problem(self) -> str | None:
        """One sentence that says which value is wrong and how to fix it, or None."""
        for name, low in (("sync_every", 1), ("fragments", 1), ("overlap", 0), ("quorum", 1),
                          ("max_staleness", 0), ("learners", 0)):  # fmt: skip
            count = getattr(self, name)
            if count < low:
                return f"{name}={count} is too small: use at least {low}."
        if self.fragments > self.sync_every:
            return (
                f"fragments={self.fragments} is more than sync_every={self.sync_every}, so some"
                f" fragments would share a step: use fragments={self.sync_every} or fewer, or raise"
                " sync_every."
            )
        if self.overlap >= self.sync_every and self.overlap > 0:
            return (
                f"overlap={self.overlap} does not fit into sync_every={self.sync_every}: a fragment"
                f" must land before it is due again, so use overlap={self.sync_every - 1} or less."
            )
        for name, least, most in (
            ("grace", 0.0, 1.0),
            ("alpha", 0.0, 1.0),
            ("outer_momentum", 0.0, 1.0),
        ):
            share = getattr(self, name)
            if not least <= share <= most or (share == 1.0 and name != "grace"):
                return f"{name}={share} is out of range: use a value from {least} to below {most}."
        for name in ("outer_lr", "norm_guard", "lease", "close_timeout"):
            value = getattr(self, name)
            if not 0.0 < value < float("inf"):
                return f"{name}={value} must be a positive number."
        for name, choices in (
            ("merge", ("rda", "direct")),
            ("codec", ("fp32", "bf16")),
            ("buffers", ("merge", "local")),
        ):
            choice = getattr(self, name)
            if choice not in choices:
                return f"{name}={choice!r} is unknown: use one of {', '.join(choices)}."
        if self.lockstep and self.learners < 1:
            return "lockstep needs to know how many learners there are: set --learners (e.g. 2)."
        return None

    @property
    def wanted(self) -> int:
        """Pushes that a round wants before its grace window opens."""
        return self.learners if self.lockstep else self.quorum

    @property
    def lossy(self) -> bool:
        """Do fragments lose digits on the wire, closing rounds aside?"""
        return self.codec != "fp32"

    @property
    def lease_ns(self) -> int:
        """The lease in nanoseconds."""
        return int(self.lease * SECOND_NS)


#: Named starting points; every key can still be overridden. `diloco` and `streaming` take the
#: values of their papers (arXiv 2311.08105, 2501.18512), momentum 0.9 included.
PRESETS: Final[dict[str, dict[str, Any]]] = {
    "decoupled": {},
    "finetune": {"outer_lr": 1.0, "outer_momentum": 0.0, "outer_nesterov": False},
    "diloco": {
        "fragments": 1, "overlap": 0, "lockstep": True, "merge": "direct", "outer_momentum": 0.9,
    },
    "streaming": {
        "lockstep": True, "merge": "direct", "alpha": 0.5, "outer_momentum": 0.9,
    },
}  # fmt: skip
