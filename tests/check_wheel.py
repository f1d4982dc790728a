"""Build the wheel, install it without dependencies beside .venv's packages, train two steps."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(*command: str | Path, cwd: Path = ROOT, **env: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}")
    return done.stdout


def package_files(folder: Path) -> set[str]:
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in found if "__pycache__" not in path.parts}


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        shutil.copytree(ROOT / "bellmask", scratch / "source" / "bellmask")
        for file in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / file, scratch / "source" / file)
        run(
            sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", scratch / "dist",
            scratch / "source",
        )  # fmt: skip
        (wheel,) = (scratch / "dist").glob("*.whl")
        environment = scratch / "environment"
        venv.create(environment, with_pip=False)
        python = environment / "bin" / "python"
        run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", wheel)
        paths = run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])")
        (Path(paths.strip()) / "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        where = run(python, "-c", "import bellmask; print(bellmask.__file__)", cwd=scratch)
        assert str(environment) in where, f"not the wheel's package: {where}"
        packed, here = package_files(Path(where).parent), package_files(ROOT / "bellmask")
        assert packed == here, f"only on one side: {packed ^ here}"
        text = scratch / "text.txt"
        text.write_text("All work and no play makes a dull demonstration. " * 200)
        out = run(
            environment / "bin" / "bellmask", "train", "tiny", "--train.steps", "2",
            "--data.train", text, "--out", "run",
            cwd=scratch, BELLMASK_CACHE=str(scratch / "cache"),
        )  # fmt: skip
        assert "done: step 2" in out, out
    print(f"the wheel {wheel.name} installs and trains")


if __name__ == "__main__":
    main()
