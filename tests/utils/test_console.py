"""Messages of the library: lines of a command, records for a program."""

from __future__ import annotations

import logging
import subprocess
import sys

from commands import bellmask, refuses, succeeds

from bellmask.utils.console import messages_on_stderr

LOGGER = logging.getLogger("bellmask.some.module")


def test_commands_show_notes_and_warnings_as_lines(capsys):
    root = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(root)  # as some packages do
    try:
        with messages_on_stderr():
            LOGGER.info("so many tokens: %d", 3)
            LOGGER.warning("damaged\x1b[2J")
            LOGGER.debug("not shown")
    finally:
        logging.getLogger().removeHandler(root)
    assert capsys.readouterr().err == "note: so many tokens: 3\nwarning: damaged·[2J\n"


def test_quiet_and_verbose(zoo):
    """Before or after the command; results are printed in any case."""
    evaluate = ["evaluate", zoo / "bell", "--blocks", "2", "--data", zoo / "text.txt"]
    plain, verbose = succeeds(*evaluate), succeeds("--verbose", *evaluate)
    assert "debug: " not in plain.err
    assert "debug: " in verbose.err
    prompted = ["generate", zoo / "bell", "--num", "1", "--prompt", "the cat", "--steps", "2"]
    assert "note: " in succeeds(*prompted).err
    said = succeeds(*prompted, "--quiet")
    assert "note: " not in said.err
    assert said.out == succeeds(*prompted).out
    refuses("--quiet", "evaluate", "nowhere", names="nowhere")


def test_verbose_shows_where_an_error_was_raised():
    said = bellmask("evaluate", "nowhere", "--verbose")
    assert said.code == 2
    assert "Traceback" in said.err


def test_a_command_leaves_the_logger_as_it_was(zoo, caplog):
    said = succeeds("generate", zoo / "bell", "--num", "1", "--prompt", "the cat", "--steps", "2")
    assert said.err.startswith("note: the run was not fine-tuned on prompts")
    with caplog.at_level(logging.INFO, logger="bellmask"):
        LOGGER.info("for the program")
    assert caplog.messages == ["for the program"]
    assert not logging.getLogger("bellmask").handlers


def test_a_program_that_sets_nothing_up_sees_warnings_alone():
    code = (
        "import logging, bellmask.run\n"
        "logging.getLogger('bellmask.x').info('a note')\n"
        "logging.getLogger('bellmask.x').warning('a warning')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "a warning\n"
