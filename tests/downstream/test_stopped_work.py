"""Work that is interrupted or killed goes on, and nothing is done twice."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import downstream_tools
import pytest
from downstream_tools import answers, noisy, tasks

from bellmask.downstream import work as work_file
from bellmask.downstream.work import Work


@pytest.mark.parametrize("place", [0, 1, 40, 150, 10_000])
def test_stopped_work_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    monkeypatch.setattr(work_file, "CHUNK", 7)
    whole = Work(noisy(), tasks(), (0, 1), tmp_path / "whole")
    whole.do()

    def stop(done: int) -> None:
        if done >= place:
            raise KeyboardInterrupt

    first, second = noisy(), noisy()
    stopped = Work(first, tasks(), (0, 1), tmp_path / "stopped")
    total = stopped.missing()
    if place < total:
        with pytest.raises(KeyboardInterrupt):
            stopped.do(stop)
    else:
        stopped.do(stop)
    resumed = Work(second, tasks(), (0, 1), tmp_path / "stopped")
    left = resumed.missing()
    assert place - 7 <= total - left or left == 0
    resumed.do()
    assert len(second.scored) + len(second.written) == left
    assert answers(resumed) == answers(whole)


def test_killed_work_goes_on(tmp_path: Path) -> None:
    script = """
        import os, signal, sys
        from pathlib import Path
        from bellmask.downstream import work
        from downstream_tools import noisy, tasks
        work.CHUNK = 7
        def kill(done):
            if done > 60:
                os.kill(os.getpid(), signal.SIGKILL)
        work.Work(noisy(), tasks(), (0, 1), Path(sys.argv[1])).do(kill)
    """
    code = f"import sys; sys.path.insert(0, {str(Path(downstream_tools.__file__).parent)!r})\n"
    command = [sys.executable, "-c", code + textwrap.dedent(script), str(tmp_path / "killed")]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    (path,) = (tmp_path / "killed").iterdir()
    with path.open("a", encoding="utf-8") as stream:
        stream.write('{"key": "half of a li')
    one, whole = noisy(), Work(noisy(), tasks(), (0, 1), tmp_path / "whole")
    resumed = Work(one, tasks(), (0, 1), tmp_path / "killed")
    left = resumed.missing()
    assert 0 < left <= whole.missing() - 56
    resumed.do()
    assert len(one.scored) + len(one.written) == left
    whole.do()
    assert answers(resumed) == answers(whole)
