"""Every rank of a learner hears what its leader says. Real processes, real gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diloco_plugin.learner.island import Group, Solo, detect

RANK = """
import json, sys
import torch
import torch.distributed as dist
from diloco_plugin.learner.island import Group, detect

rank, size, meeting = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
island = detect()
seen = {"kind": type(island).__name__, "leader": island.leader, "size": island.size}
seen["plans"] = [
    island.share_plan(plan if rank == 0 else [99])
    for plan in ([], [7, -1, 2**40], list(range(31)), list(range(32)), list(range(500)))
]
texts = ("", "é tcp://x", "a" * 9000)
seen["texts"] = [island.share_text(text if rank == 0 else "mine") for text in texts]
flat = torch.arange(5, dtype=torch.float32) * (1 if rank == 0 else -1)
island.share_flat(flat)
seen["flat"] = flat.tolist()
try:
    island.share_flat(torch.zeros(4, 4).t()[1:])
except ValueError as error:
    seen["refused"] = str(error)
if size == 3:
    # The learner is ranks 1 and 2 only; rank 0 is somebody else's.
    part = dist.new_group([1, 2], backend="gloo")
    if rank > 0:
        group = Group(part)
        seen["part"] = [group.leader, group.size, group.share_plan([rank])]
        group.close()
island.close()
island.close()
try:
    island.share_plan([])
except RuntimeError as error:
    seen["closed"] = str(error)
dist.barrier()
dist.destroy_process_group()
print(json.dumps(seen))
"""


def run_ranks(size: int, tmp_path: Path) -> list[dict[str, object]]:
    meeting = tmp_path / "meeting"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(size), str(meeting)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        outputs = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank, (_, errors) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, errors
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


def test_all_ranks_get_the_leaders_plans_texts_and_numbers(tmp_path: Path) -> None:
    leader, follower = run_ranks(2, tmp_path)
    assert (leader.pop("leader"), follower.pop("leader")) == (True, False)
    assert leader == follower
    assert leader["kind"] == "Group"
    assert leader["size"] == 2
    assert leader["plans"] == [
        [],
        [7, -1, 2**40],
        list(range(31)),
        list(range(32)),
        list(range(500)),
    ]
    assert leader["texts"] == ["", "é tcp://x", "a" * 9000]
    assert leader["flat"] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert "contiguous CPU tensor" in str(leader["refused"])
    assert "closed" in str(leader["closed"])


def test_a_learner_may_be_a_part_of_the_world(tmp_path: Path) -> None:
    outside, first, second = run_ranks(3, tmp_path)
    assert "part" not in outside
    assert first["part"] == [True, 2, [1]]
    assert second["part"] == [False, 2, [1]]


def test_one_process_is_its_own_leader() -> None:
    island = detect()
    assert isinstance(island, Solo)
    assert island.leader
    assert island.size == 1
    assert island.share_plan((1, 2)) == [1, 2]
    assert island.share_text("x") == "x"
    flat = torch.ones(3)
    island.share_flat(flat)
    assert torch.equal(flat, torch.ones(3))
    island.close()


def test_solo_and_group_have_the_same_interface() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert public(Solo) - {"leader", "size"} == public(Group)


def test_a_group_without_torch_distributed_raises() -> None:
    with pytest.raises((RuntimeError, ValueError)):
        Group()
