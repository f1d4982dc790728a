"""Files that describe the project agree with one another."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from bellmask import __version__

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FORMS = sorted((ROOT / ".github").rglob("*.yml"))


def test_the_version_is_the_changelogs_and_the_citations():
    releases = re.findall(r"^## (\S+) \((\S+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert releases[0] == (__version__, citation["date-released"])
    assert citation["version"] == __version__
    assert [one["name"] for one in citation["authors"]] == [a["name"] for a in PROJECT["authors"]]
    assert citation["license"] == PROJECT["license"]


def test_the_lowest_versions_are_the_bounds():
    bounds = dict(re.split(r">=", line) for line in PROJECT["dependencies"])
    lines = (ROOT / "constraints-lowest.txt").read_text().splitlines()
    lowest = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert lowest.keys() == bounds.keys()
    for name, version in lowest.items():
        assert version.removesuffix(".0").startswith(bounds[name].removesuffix(".0")), name


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_forms_and_workflows_are_yaml(path):
    assert {"name"} < yaml.safe_load(path.read_text(encoding="utf-8")).keys()


def test_the_workflow_runs_what_exists():
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    for file in re.findall(r"constraints: (constraints\S*txt)|run: (\.ci/run)", workflow):
        assert (ROOT / next(filter(None, file))).exists()
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"run: make (\S+)", workflow)) <= set(targets)
    versions = {c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d", c)}
    assert set(re.findall(r'python: "(3\.\d+)"', workflow)) == versions
