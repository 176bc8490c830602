"""The rules of the source tree: who imports whom, where backends may appear, sizes, links, paths."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE_FOLDERS = ("pallas_kernels", "models", "ssv_jax")
LINKS = ("models", "pallas_kernels")
HOST_DECISIONS = ("controller.py", "profiles.py")
MAX_LINES = 600
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".json", ".csv", ".sh", ""}
MAX_SCANNED_BYTES = 4_000_000


def walk(*folders: str) -> Iterator[Path]:
    """Files under the given folders; links are not followed, so each file comes once. Caches are left out."""
    for folder in folders:
        for base, names, files in (ROOT / folder).walk(follow_symlinks=False):
            names[:] = [n for n in names if n != "__pycache__" and not n.endswith(".egg-info")]
            yield from (base / file for file in sorted(files) if not (base / file).is_symlink())


def source_files() -> list[Path]:
    """Python files of the library."""
    return [path for path in walk(*SOURCE_FOLDERS) if path.suffix == ".py"]


def python_files() -> list[Path]:
    """All Python files: library, tests, experiments."""
    return source_files() + [path for path in walk("tests", "experiments") if path.suffix == ".py"]


def text_files() -> list[Path]:
    """Every file that is committed as text."""
    top = [path for path in ROOT.iterdir() if path.is_file() and path.name not in ("uv.lock", ".git")]
    found = top + list(walk(*SOURCE_FOLDERS, "tests", "experiments", ".ci"))
    return [p for p in found if p.suffix in TEXT_SUFFIXES and p.stat().st_size <= MAX_SCANNED_BYTES]


def imported_modules(path: Path) -> set[str]:
    """Absolute module names that a file imports anywhere; of `from a import b`, both `a` and `a.b`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def relative(paths: list[Path]) -> list[str]:
    """Paths below the repository root, for messages."""
    return [str(path.relative_to(ROOT)) for path in paths]


def test_imports_follow_the_layers():
    # In a process of its own: the checker reads the source and must not meet this process's import hook.
    script = "import sys; from importlinter import cli; sys.exit(cli.lint_imports(no_cache=True, no_logo=True))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_backends_are_imported_only_in_their_own_files():
    # `mosaic_gpu.py`, `triton.py` and helpers named after them (`mosaic_gpu_copy.py`, a folder `mosaic/`).
    named = re.compile(r"_?(mosaic|triton)")
    offenders = [
        path
        for path in source_files()
        if any(module.startswith("jax.experimental.pallas") for module in imported_modules(path))
        and not any(named.match(part) for part in path.relative_to(ROOT).with_suffix("").parts)
    ]
    assert not offenders, relative(offenders)


def test_folders_are_imported_under_the_library_only():
    # A second import as top-level `models` would give a second copy of each class.
    offenders = [
        path for path in python_files() if any(module.split(".")[0] in LINKS for module in imported_modules(path))
    ]
    assert not offenders, relative(offenders)


def test_linked_folders_import_relatively():
    offenders = [
        path
        for path in walk(*LINKS)
        if path.suffix == ".py" and any(m.split(".")[0] == "ssv_jax" for m in imported_modules(path))
    ]
    assert not offenders, relative(offenders)


@pytest.mark.parametrize("name", HOST_DECISIONS)
def test_host_decisions_do_not_import_jax(name):
    # Here and not among the layers' contracts, which cannot name a module that is absent.
    path = ROOT / "ssv_jax" / name
    if not path.exists():
        pytest.skip(f"there is no {name}")
    roots = {module.split(".")[0] for module in imported_modules(path)}
    assert not roots & {"jax", "jaxlib", "flax", "optax"}


@pytest.mark.parametrize("name", LINKS)
def test_links_are_relative_and_resolve(name):
    link = ROOT / "ssv_jax" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name
    assert link.resolve() == ROOT / name
    assert (link / "__init__.py").is_file()


def test_files_stay_readable():
    too_long = {
        str(path.relative_to(ROOT)): lines
        for path in python_files()
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert not too_long, f"split these (more than {MAX_LINES} lines): {too_long}"
    nameless = [path for path in python_files() if path.name in ("utils.py", "helpers.py", "misc.py")]
    assert not nameless, f"name these after what they hold: {relative(nameless)}"


def test_no_file_names_a_machine():
    # Spelt in parts, so that this file passes its own check.
    folders = "|".join(("home", "root", "opt", "work", "Users", "mnt"))
    path_pattern = re.compile(rf"(?<![\w./\-:])/(?:{folders})/\w")
    host_pattern = re.compile("|".join(("pypi" + r"\.org", "pythonhosted" + r"\.org", "index" + "-url +http")))
    offenders = []
    for path in text_files():
        text = path.read_text(encoding="utf-8")
        for pattern in (path_pattern, host_pattern):
            if match := pattern.search(text):
                line = text.count("\n", 0, match.start()) + 1
                offenders.append(f"{path.relative_to(ROOT)}:{line}: {match.group()}")
    assert not offenders, offenders


def test_importing_the_library_stays_light():
    # transformers takes seconds and is needed by few; it is imported where it is used.
    heavy = ("transformers", "torch", "matplotlib")
    script = f"import sys, ssv_jax; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
