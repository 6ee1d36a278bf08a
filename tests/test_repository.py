"""What the repository says about itself is so."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = [
    *sorted((ROOT / "diloco_plugin").rglob("*.py")),
    *sorted((ROOT / "integrations").rglob("*.py")),
]
BANNED_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
BANNED_NAMES = {
    "eval", "exec", "recv_pyobj", "send_pyobj", "broadcast_object_list", "all_gather_object",
}  # fmt: skip


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    named = re.findall(r"`(tests/[\w/.]+)(?:::(\w+))?`", page.read_text())
    assert named or page.name not in ("README.md", "robustness.md"), "the promises name no test"
    for file, function in named:
        assert (ROOT / file).exists(), f"{page.name} names {file}"
        if function:
            assert f"def {function}(" in (ROOT / file).read_text(), f"{page.name} names {function}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_file_that_a_page_links_exists(page: Path) -> None:
    for target in re.findall(r"\]\(([\w./-]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links {target}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_source_can_unpickle_or_execute_what_it_is_given(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not BANNED_MODULES & {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in BANNED_MODULES
        elif isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            module = getattr(getattr(called, "value", None), "id", "")
            assert name not in BANNED_NAMES or (module, name) == ("model", "eval"), name
            assert (module, name) not in {("torch", "load"), ("torch", "save")}


def test_importing_the_package_loads_nothing_that_is_not_needed() -> None:
    program = (
        "import sys, diloco_plugin\n"
        "extras = {'lightning', 'transformers', 'huggingface_hub', 'rich'}\n"
        "heavy = extras | {'torch', 'zmq', 'msgspec'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        "diloco_plugin.attach, diloco_plugin.shard\n"
        "print(sorted(extras & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["[]", "[]"], done.stderr
