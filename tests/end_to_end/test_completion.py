"""`bellmask completion`: the scripts complete what the commands take."""

import shutil
import subprocess

import pytest
from commands import succeeds

from bellmask.cli import COMMANDS

ASK = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_bellmask; printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "bellmask.bash"
    path.write_text(succeeds("completion", "bash").out, encoding="utf-8")
    return path


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not here")
def test_bash_completes(script, tmp_path):
    for typed, found in {
        "": " ".join(COMMANDS),
        "train ti": "tiny tiny_base tiny_bell",
        "train tiny --mod": "--model.width --model.num-layers",
        "train tiny --res": "--resume",
        "evaluate run --suite gen": "generative",
        "evaluate x --suite zero-shot --corp": "--corpora",
        "analyze grad": "gradient-radius gradient-additivity",
        "analyze gradient-radius x --rad": "--radii",
        "data s": "show",
        "data show x --data.blo": "--data.block-length",
        "compare tiny --suite fam": "families",
        "report trace x --fra": "--frames",
        "judge pairwise a b --ben": "--benchmark",
        "completion z": "zsh",
    }.items():
        words = ["bellmask", *typed.split(" ")]
        asked = ["bash", "-c", ASK, "bash", str(script), *words]
        done = subprocess.run(asked, capture_output=True, text=True, check=True, cwd=tmp_path)
        got = set(done.stdout.split())
        assert set(found.split()) <= got, typed
        assert all(word.startswith(words[-1]) for word in got), typed


def test_zsh_runs_the_same_script(script, tmp_path):
    first, _, rest = succeeds("completion", "zsh").out.partition("\n")
    assert "bashcompinit" in first
    assert rest == script.read_text(encoding="utf-8")
    if shutil.which("zsh") is not None:
        path = tmp_path / "script"
        path.write_text(first + "\n" + rest, encoding="utf-8")
        subprocess.run(["zsh", "-n", str(path)], check=True)
