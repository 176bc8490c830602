"""Downloads the packages of the manifest, checks them and unpacks them into a scratch folder; nothing is installed."""

from __future__ import annotations

import fnmatch
import hashlib
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

Say = Callable[[str], None]


class FetchError(RuntimeError):
    """A package that cannot be had, or is another one than the manifest names."""


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(package: dict[str, Any], folder: Path, say: Say) -> Path:
    """The package's file in `folder`, downloaded if it is not there, with the manifest's sha256."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / package["file"]
    name, version = package["package"], package["version"]
    if not path.is_file():
        say(f"downloading {name} {version}")
        if package["kind"] == "deb":
            command = ["apt-get", "download", f"{name}={version}"]
        else:
            form = ["--no-binary", ":all:"] if package["kind"] == "sdist" else ["--only-binary", ":all:"]
            pip = [sys.executable, "-m", "pip"] if _has_pip() else ["pip"]
            command = [*pip, "download", "--quiet", "--no-deps", *form, f"{name}=={version}"]
        tool = command[0]
        if shutil.which(tool) is None:
            raise FetchError(f"{name}: {tool} is needed to download it; run this on Debian 12 with pip, or copy {path}")
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode or not path.is_file():
            why = (done.stderr.strip().splitlines() or ["no such file afterwards"])[-1]
            raise FetchError(
                f"{name} {version}: download failed ({why}). Run 'apt-get update' first; if that version has left the "
                f"mirror, put the file {path.name} into {folder} or update manifest.json"
            )
    found = sha256(path)
    if found != package["sha256"]:
        raise FetchError(f"{path}: sha256 {found}, the manifest has {package['sha256']}; delete it and run again")
    return path


def _has_pip() -> bool:
    return subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode == 0


def unpack(kind: str, path: Path, folder: Path, globs: list[str]) -> None:
    """Writes those files of a package under `folder` that match a glob; `*` matches slashes too. Links are left out."""
    folder.mkdir(parents=True, exist_ok=True)

    def wanted(name: str) -> bool:
        return any(fnmatch.fnmatch(name.removeprefix("./"), glob) for glob in globs)

    if kind == "wheel":
        with zipfile.ZipFile(path) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if wanted(name)])
    elif kind == "sdist":
        with tarfile.open(path) as archive:
            archive.extractall(folder, [m for m in archive if m.isfile() and wanted(m.name)], filter="data")
    else:
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", path], stdout=subprocess.PIPE) as process:
            with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
                for member in archive:
                    if member.isfile() and wanted(member.name):
                        archive.extract(member, folder, filter="data")
        if process.returncode:
            raise FetchError(f"{path}: dpkg-deb cannot read it; delete it and run again")
