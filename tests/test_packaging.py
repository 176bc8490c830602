"""The wheel: what it holds, and that it works from a folder that has its own `models`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("models", "pallas_kernels")
# Of a model that ships inside the package; the wheel must take what it finds there, at any depth.
WEIGHTS = ("test-model/config.json", "test-model/delta.safetensors", "test-model/README.md", "test-model/eagle3/x.bin")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy of the sources so that the checkout stays clean."""
    source = tmp_path_factory.mktemp("source")
    for name in (*FOLDERS, "ssv_jax"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    for name in WEIGHTS:
        file = source / "ssv_jax" / "weights" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    out = tmp_path_factory.mktemp("wheel")
    # The development group holds the build backend: no second environment, and no network.
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The wheel's files laid out as an installer lays out a pure wheel."""
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def run_python(script: str, *, site: Path, cwd: Path) -> str:
    """Output of a script in a fresh process that finds the package in `site` alone."""
    env = os.environ | {"PYTHONPATH": str(site), "PYTHONWARNINGS": "error"}
    done = subprocess.run([sys.executable, "-c", script], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_wheel_holds_every_source_file_once(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert len(names) == len(set(names))
    packed = {name for name in names if name.endswith(".py")}
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "ssv_jax").glob("**/*.py")}
    for folder in FOLDERS:
        expected |= {f"ssv_jax/{path.relative_to(ROOT)}" for path in (ROOT / folder).glob("**/*.py")}
    assert packed == expected


def test_wheel_holds_the_data_files(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert "ssv_jax/py.typed" in names
    for folder in FOLDERS:
        data = {f"ssv_jax/{path.relative_to(ROOT)}" for path in (ROOT / folder).glob("**/*.json")}
        assert data <= names
    shipped = {str(path.relative_to(ROOT)) for path in (ROOT / "ssv_jax" / "weights").glob("**/*") if path.is_file()}
    shipped |= {f"ssv_jax/weights/{name}" for name in WEIGHTS}
    assert {name for name in names if name.startswith("ssv_jax/weights/")} == shipped


def test_wheel_takes_one_name_only(wheel):
    with zipfile.ZipFile(wheel) as archive:
        top = {name.split("/")[0] for name in archive.namelist()}
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    requirements = [line for line in lines if line.startswith("Requires-Dist")]
    assert {name for name in top if not name.endswith(".dist-info")} == {"ssv_jax"}
    # The weights package names an inference library that installers would compile: it must not reach users.
    assert not [line for line in requirements if "llm" in line or "llama" in line]
    assert all("<" in line for line in requirements), "every dependency has an upper bound"


def test_wheel_works_beside_a_users_own_models(installed, tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("MINE = True\n")
    script = (
        "import models, ssv_jax, ssv_jax.models, ssv_jax.pallas_kernels\n"
        "print(models.MINE, ssv_jax.__file__, ssv_jax.models.__file__, ssv_jax.pallas_kernels.__file__)"
    )
    mine, *files = run_python(script, site=installed, cwd=tmp_path).split()
    assert mine == "True"
    assert all(Path(file).is_relative_to(installed) for file in files)


def test_installed_command_answers(installed, tmp_path):
    script = "import sys; from ssv_jax.generate import main; sys.exit(main(['--help']))"
    assert "usage" in run_python(script, site=installed, cwd=tmp_path)
