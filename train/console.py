"""What the console scripts share: errors of the user come out as one line, exit code 2 and no traceback."""

import difflib
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

import jsonargparse

# How jsonargparse names an option it does not know, on the command line and in a configuration file.
UNKNOWN = re.compile(
    r"unrecognized arguments: --(?P<argument>[\w.-]+)"
    r"|(?:Group '(?P<group>[\w.]+)' does not accept o|O)ption '(?P<option>[\w.]+)'(?: is not accepted)?"
    r"|does not accept option '(?P<nested>[\w.]+)'"
)
KEY = re.compile(r"""^Parser key "([^"]+)":\s*""")
# Its complaints about types, and what is left of them.
TYPES = {
    r"Does not validate against any of the Union subtypes Subtypes: \[(.*?)\] Errors:.*Given value: (.*)$": (
        r"expected one of \1, got \2"
    ),
    r"Expected an? (.*?)\. Got value: ": r"expected \1, got ",
    r"<class '(\w+)'>": r"\1",
    r"typing\.": "",
}


class Parser(jsonargparse.ArgumentParser):
    """An argument parser whose errors are one line; an unknown key is answered with the nearest known one."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Prints `program: error: …` and exits with 2."""
        if not self.exit_on_error:  # jsonargparse's inner parsers expect to catch the error themselves
            super().error(message, ex)
        print_error(self.prog.split()[0], self._plain(message))
        sys.exit(2)

    def _plain(self, message: str) -> str:
        line = KEY.sub(r"\1: ", " ".join(message.split()))
        for pattern, replacement in TYPES.items():
            line = re.sub(pattern, replacement, line)
        unknown = UNKNOWN.search(line)
        if not unknown:
            return line
        name = unknown["argument"] or unknown["option"] or unknown["nested"]
        key = f"{unknown['group']}.{name}" if unknown["group"] else name
        nearest = difflib.get_close_matches(key, set(_keys(self)), n=1, cutoff=0.0)
        return f"unknown key {key}" + (f"; the nearest known one is {nearest[0]}" if nearest else "")


def run(program: str, body: Callable[[], None]) -> int:
    """Runs a command and turns what may go wrong into an exit code.

    Args:
        program: the command's name, which begins each line.
        body: parses, builds and calls; raises ValueError or OSError for what the user did.

    Returns:
        0; 2 after an error of the user; 130 after Ctrl-C.
    """
    _configure_logging()
    try:
        body()
    except KeyboardInterrupt:
        print(f"{program}: interrupted; the same command resumes from the last checkpoint", file=sys.stderr)
        return 130
    except SystemExit as stop:  # argparse, after --help or after an error it has printed
        return stop.code if isinstance(stop.code, int) else 0
    except OSError as error:
        named = error.filename and error.strerror
        print_error(program, f"{error.filename}: {error.strerror}" if named else str(error))
        return 2
    except ValueError as error:
        print_error(program, str(error))
        return 2
    return 0


def print_error(program: str, message: str) -> None:
    """One line on stderr, whatever the message's own line breaks."""
    print(f"{program}: error: {' '.join(message.split())}", file=sys.stderr)


def _configure_logging() -> None:
    """Shows our own log lines: of several processes, only the main one speaks."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    for package in ("train", "distill", "decode"):
        logger = logging.getLogger(package)
        logger.handlers = [handler]
        logger.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.ERROR)
    # A model that cannot be reached ends in one line of ours; the hub's account of each retry is noise.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _keys(parser: jsonargparse.ArgumentParser) -> Iterator[str]:
    """Dotted names of all options of a parser and of its subcommands."""
    yield from parser.get_defaults(skip_validation=True).keys()
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for subparser in action.choices.values():
                yield from _keys(subparser)
