"""The house: which part may import which."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "longstraw"
FOUNDATION = {"errors", "options", "compat", "blocks", "ops", "scans", "layout", "stages"}
ALLOWED = {
    "errors": set(),
    "compat": {"errors"},
    "options": {"errors"},
    "blocks": {"errors"},
    "ops": {"errors", "options"},
    "scans": {"errors", "options", "compat"},
    "layout": {"errors", "compat"},
    "stages": {"errors", "options", "compat", "blocks", "ops", "layout"},
    "arch": FOUNDATION,
    "passes": FOUNDATION | {"arch"},
    "runtime": FOUNDATION,
}


def imports(path: Path) -> Iterator[str]:
    """Yield the parts of longstraw that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "longstraw":
            parts = node.module.split(".")
            yield from [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]


@pytest.mark.parametrize("part", ALLOWED)
def test_imports_point_down(part: str) -> None:
    files = sorted((ROOT / part).rglob("*.py")) if (ROOT / part).is_dir() else [ROOT / f"{part}.py"]
    assert files
    for path in files:
        for name in imports(path):
            assert name == part or name in ALLOWED[part], f"{path.relative_to(ROOT)} imports longstraw.{name}"


def test_private_torch_modules_are_imported_in_one_place() -> None:
    for path in ROOT.rglob("*.py"):
        if path.parent == ROOT / "compat":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [module or ""]
            for name in names:
                private = [part for part in name.split(".") if part.startswith("_") and part != "__future__"]
                allowed = name == "torch.utils" or not name.startswith("torch")
                assert allowed or not private, f"{path.relative_to(ROOT)} imports {name}"


def test_the_core_needs_no_extra() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['transformers', 'tqdm', 'matplotlib', 'psutil', 'tabulate'])); "
        "import longstraw.backend, longstraw.explain, longstraw.parity"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_no_model_is_named_in_the_core() -> None:
    names = ("qwen", "glm", "deepseek", "llama", "gemma", "mamba", "mistral", "falcon", "bloom")
    table = ROOT / "arch" / "functions.py"  # functions of model code are found by their names
    for path in ROOT.rglob("*.py"):
        text = path.read_text().lower()
        assert path == table or not any(name in text for name in names), path.relative_to(ROOT)
