"""What the console scripts share: errors of the user come out as one line, exit code 2 and no traceback."""

import difflib
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any, NoReturn, get_origin

import jsonargparse

# How jsonargparse names an option it does not know, on the command line and in a configuration file.
UNKNOWN = re.compile(
    r"unrecognized arguments: --(?P<argument>[\w.-]+)"
    r"|(?:Group '(?P<group>[\w.]+)' does not accept o|O)ption '(?P<option>[\w.-]+)'(?: is not accepted)?"
    r"|does not accept option '(?P<nested>[\w.-]+)'"
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
    # null may be left out, and who gives a value means something else
    r"(expected one of .*?), NoneType(?=, got )": r"\1",
    r"expected one of ([^,]+)(?=, got )": r"expected \1",
}

# what to say after Ctrl-C, where that is so
RESUMES = "interrupted; the same command goes on from what is saved"


class Parser(jsonargparse.ArgumentParser):
    """An argument parser whose errors are one line; an unknown key is answered with the nearest known one."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, allow_abbrev=False, **options)  # half a key is a mistake, not a key

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Prints `program: error: …` and exits with 2."""
        if not self.exit_on_error:  # jsonargparse's inner parsers expect to catch the error themselves
            super().error(message, ex)
        print_error(self.prog.split()[0], self._plain(message))
        sys.exit(2)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, *more: Any, **options: Any
    ) -> jsonargparse.Namespace:
        """Also takes hyphens for underscores in names of options, `--flag` for `--flag true`, and `--list a b`."""
        given = list(sys.argv[1:] if args is None else args)
        commands = [name for action in self._actions if isinstance(action.choices, dict) for name in action.choices]
        self.command = next((word for word in given if word in commands), None)
        if commands and self.command is None and given[:1] and given[0].startswith("--config"):
            self.error(
                f"command: none is given, and the file may have sections for several; add {' or '.join(commands)}"
            )
        flags = set(_options(self, _is_flag))
        lists = {name for name in _options(self, _is_list) if not name.endswith("+")}
        return super().parse_args(list(_spelled_out(given, flags, lists)), *more, **options)

    def _plain(self, message: str) -> str:
        line = KEY.sub(r"\1: ", " ".join(message.split()))
        for pattern, replacement in TYPES.items():
            line = re.sub(pattern, replacement, line)
        unknown = UNKNOWN.search(line)
        if not unknown:
            return line
        name = unknown["argument"] or unknown["option"] or unknown["nested"]
        key = f"{unknown['group']}.{name}" if unknown["group"] else name
        # a key of another subcommand is not known here
        known = set(_keys(self, getattr(self, "command", None))) - {key}
        in_a_group = [name for name in known if name.endswith(f".{key}")]
        nearest = in_a_group or difflib.get_close_matches(key, known, n=1, cutoff=0.0)
        return f"unknown key {key}" + (f"; the nearest known one is {nearest[0]}" if nearest else "")


def run(program: str, body: Callable[[], None], interrupted: str = "interrupted") -> int:
    """Runs a command and turns what may go wrong into an exit code.

    Args:
        program: the command's name, which begins each line.
        body: parses, builds and calls; raises ValueError or OSError for what the user did.
        interrupted: what to say after Ctrl-C.

    Returns:
        0; 2 after an error of the user; 130 after Ctrl-C; 141 when nobody reads the output any more.
    """
    _configure_logging()
    # read by torch: large tensors come and go at each step, and small pages of theirs are faulted in one by one
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    try:
        body()
    except KeyboardInterrupt:
        print(f"{program}: {interrupted}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our output has seen enough; nothing may be flushed to them at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
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


def run_commands(
    program: str,
    description: str,
    commands: dict[str, tuple[type, Callable[[Any], None], str]],
    argv: list[str] | None,
    interrupted: str = "interrupted",
) -> int:
    """Runs the subcommand that the command line names.

    Args:
        program: the console script.
        description: what it is for.
        commands: by name: its config dataclass, what to call with one, a line of help.
        argv: the command line; this process's own when None.
        interrupted: what to say after Ctrl-C.

    Returns:
        As `run`.
    """

    def body() -> None:
        parser = Parser(prog=program, description=description)
        parser.add_argument("--config", action="config", help="YAML file with a section for each command")
        subcommands = parser.add_subcommands(dest="command")
        for name, (config_class, _, help_text) in commands.items():
            summary = (config_class.__doc__ or "").split("\n")[0]
            subparser = Parser(prog=f"{program} {name}", description=summary)
            subparser.add_argument("--config", action="config", help="YAML file; options after it override its values")
            subparser.add_class_arguments(config_class)
            subcommands.add_subcommand(name, subparser, help=help_text)
        options = instantiated(parser, argv)
        config_class, command, _ = commands[options.command]
        chosen = options[options.command]
        command(config_class(**{field.name: chosen[field.name] for field in fields(config_class)}))

    return run(program, body, interrupted)


def instantiated(parser: Parser, argv: list[str] | None) -> jsonargparse.Namespace:
    """Parses a command line and builds the dataclasses in it.

    Raises:
        ValueError: a value that a dataclass refuses, or a group of options that is given as something else.
    """
    options = parser.parse_args(argv)
    try:
        built: jsonargparse.Namespace = parser.instantiate(options)
        return built
    except TypeError as error:
        raise ValueError(f"config: a group of options must be a mapping of its keys: {error}") from error


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
    # Transformers imports torchao where it is installed, which tells everyone what it has no use for here.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # A model that cannot be reached ends in one line of ours; the hub's account of each retry is noise.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _spelled_out(args: list[str], flags: set[str], lists: set[str]) -> Iterator[str]:
    """Arguments as jsonargparse wants them: names with underscores, booleans with their value, lists item by item."""
    items_of = None
    for argument, following in pairwise([*args, "--"]):
        name, equals, value = argument.partition("=")
        if not name.startswith("--"):
            if items_of:
                yield f"{items_of}+"
            yield argument
            continue
        name = "--" + name[2:].replace("-", "_")
        yield name + equals + value
        if name in flags and not equals and following.lower() not in ("true", "false"):
            yield "true"
        # anew, and then item by item, with "+", as subcommands find them when they spell out theirs again
        items_of = name if name in lists and not equals and not following.startswith(("[", "--")) else None
        if items_of:
            yield "[]"


def _options(parser: jsonargparse.ArgumentParser, are: Callable[[Any], bool]) -> Iterator[str]:
    """Names of the options of such a type, of a parser and of its subcommands."""
    for action in parser._actions:
        if are(getattr(action, "_typehint", None)):
            yield from action.option_strings
        if isinstance(action.choices, dict):
            for subparser in action.choices.values():
                yield from _options(subparser, are)


def _is_flag(typehint: Any) -> bool:
    return typehint is bool


def _is_list(typehint: Any) -> bool:
    return get_origin(typehint) is list


def _keys(parser: jsonargparse.ArgumentParser, command: str | None) -> Iterator[str]:
    """Dotted names of all options of a parser and of the subcommand that was chosen; of all when none was."""
    yield from parser.get_defaults(skip_validation=True).keys()
    for action in parser._actions:
        if isinstance(action.choices, dict):
            chosen = action.choices.get(command)
            for subparser in [chosen] if chosen else action.choices.values():
                yield from _keys(subparser, None)
