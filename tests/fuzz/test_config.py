"""Whatever is typed or written as options, the answer is a config or one UserError."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest
from fuzz_tools import REFUSED, SIZES, TAKEN, as_json, changed, damaged, fuzz, texts
from hypothesis import strategies as st

from bellmask.build import build_objective
from bellmask.cli import run_command
from bellmask.config import RunConfig, load_config, override
from bellmask.presets import PRESETS, preset, tiny

VALUES = [
    "", "0", "-1", "1", "3", "0.5", "1e9", "1e-9", "nan", "inf", "-inf", "None", "true", "x", "ü",
    "gaussian", "dirac", "uniform", "bell", "nelbo", "cosine", "middle_flat", "never", "5 min",
    "10M tokens", "[1, 2]", "{}", "--", "-", "a b", "=", "auto", "cuda", "muon", "1 2 3",
]  # fmt: skip
OPTIONS = [f"--{name.replace('_', '-')}" for name in RunConfig().flat()]
OPTIONS += ["--law", "--schedule", "--objective", "--optimizer", "--lw", "--", "-x", "--law.nu"]

option_values = st.sampled_from(VALUES).map(lambda text: text.split(" ")) | texts.map(lambda t: [t])
arguments = st.lists(
    st.tuples(st.sampled_from(OPTIONS), option_values | st.just([])), min_size=1, max_size=4
).map(lambda pairs: [arg for option, value in pairs for arg in (option, *value)])


def settle(config: RunConfig) -> None:
    config.check()
    build_objective(config)


@pytest.mark.parametrize("size", SIZES)
def test_any_options_are_a_config_or_an_error(size: int) -> None:
    inputs = st.tuples(st.sampled_from(list(PRESETS)), arguments)
    outcomes = fuzz(
        "options", size, inputs, lambda pair: settle(override(preset(pair[0]), pair[1]))
    )
    assert outcomes == {TAKEN, REFUSED}


def as_toml(tree: dict[str, dict[str, object]]) -> bytes:
    """One table per section; JSON's way to write a value is TOML's too, but for null."""
    lines = []
    for section, values in tree.items():
        lines += [f"[{section}]"]
        lines += [f"{name} = {json.dumps(v)}" for name, v in values.items() if v is not None]
    return "\n".join(lines).encode()


@pytest.mark.parametrize("size", SIZES)
def test_any_config_file_is_a_config_or_an_error(size: int, tmp_path: Path) -> None:
    whole = tiny().to_dict()
    plain = as_json(whole)
    inputs = st.one_of(
        st.tuples(st.just(".json"), damaged(plain) | changed(whole).map(as_json) | st.binary()),
        st.tuples(st.just(".json"), st.just(plain)),
        st.tuples(st.just(".toml"), damaged(as_toml(whole)) | st.binary()),
        st.tuples(texts.map(lambda text: f".{text[:9]}"), st.just(plain)),
    )

    def check(pair: tuple[str, bytes]) -> None:
        suffix, content = pair
        path = tmp_path / "config"
        with contextlib.suppress(OSError, ValueError):  # a name that no file can have
            path = tmp_path / f"config{suffix}"
            path.write_bytes(content)
        settle(load_config(path))

    assert fuzz("config files", size, inputs, check) == {TAKEN, REFUSED}


COMMANDS = [
    ["config", "show", "tiny"], ["config", "diff", "tiny"], ["config"], ["presets"], ["generate"],
    ["generate", "nowhere"], ["evaluate", "nowhere"], ["chat", "nowhere"], ["report", "trace"],
    ["report", "nowhere"], ["export", "nowhere"], ["import", "nowhere"], ["compare"], ["judge"],
    ["analyze"], ["data", "show"], ["lm-eval"], ["train", "nowhere"], ["prepare", "nowhere"], [],
]  # fmt: skip
MORE = [
    "--num", "--length", "--canvas", "--prompts", "--out", "--format", "--steps", "--help", "-1",
    "--trace", "--config", "--law", "--train.steps", "--rule", "--frames", "--split", "--seeds",
]  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
def test_any_command_line_ends_with_an_exit_code(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing run makes all of these quick; nothing is fetched and nothing written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    word = st.sampled_from([*MORE, *VALUES, *OPTIONS]) | texts
    inputs = st.tuples(st.sampled_from(COMMANDS), st.lists(word, max_size=4))
    codes = set()

    def check(pair: tuple[list[str], list[str]]) -> None:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = run_command([*pair[0], *pair[1]])
            except SystemExit as stop:  # how the parser ends after --help
                code = stop.code or 0
        codes.add(code)
        assert "Traceback" not in err.getvalue()
        assert (code == 2) == err.getvalue().startswith("error: ")
        assert code == 0 or "\x1b" not in err.getvalue(), "steers the terminal"
        assert code in (0, 2)

    fuzz("command lines", size, inputs, check)
    assert codes == {0, 2}
    assert not list(tmp_path.iterdir())
