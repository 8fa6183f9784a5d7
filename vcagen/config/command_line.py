"""Command lines from dataclasses, by jsonargparse; a user's mistake is one line and exit code 2."""

from __future__ import annotations

import argparse
import difflib
import inspect
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

import yaml
from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace, set_parsing_settings

T = TypeVar("T")

set_parsing_settings(docstring_parse_attribute_docstrings=True)


class Formatter(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """jsonargparse's help, with the lines of the description kept."""


class Parser(ArgumentParser):
    """jsonargparse's parser with one-line errors, no abbreviations, and the nearest valid name for an unknown one."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise ValueError(self._one_line(message))

    def _one_line(self, message: str) -> str:
        names = [option.lstrip("-") for action in self._actions for option in action.option_strings or [action.dest]]
        unknown = re.search(r"unrecognized arguments: -*([\w.]+)", message)
        nested = re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", message)
        plain = re.search(r"Option '([\w.]+)' is not accepted", message)
        if found := unknown or nested or plain:
            name = ".".join(found.groups())
            near = difflib.get_close_matches(name, names, n=1) or difflib.get_close_matches(
                name.rsplit(".", 1)[-1], names, n=1
            )
            return f"{name}: unknown option" + (f"; did you mean {near[0]}?" if near else "")
        message = re.sub(r'^Parser key "([\w.]+)":', r"\1:", message.strip())
        if given := re.search(r"(?:Given|Got) value: (.*)", message):
            kinds = re.findall(r"<class '(\w+)'>", message.split("Subtypes:")[-1].split("]")[0])
            if "Literal[" in message:
                kinds = re.findall(r"'([\w+-]+)'", message.split("Literal[")[1].split("]")[0])
            kinds = ["null" if kind == "NoneType" else kind for kind in kinds]
            key = message.split(":", 1)[0]
            hints = [str(getattr(action, "_typehint", "")) for action in self._actions if action.dest == key]
            expected = " or ".join(kinds) or " ".join(hints) or "a mapping of options"
            return f"{key}: expected {expected}, got {given.group(1)!r}"
        return re.sub(r"\s+", " ", message)


def parse(config: type[T], args: Sequence[str] | None = None, *, prog: str, positional: str | None = None) -> T:
    """Parse command-line arguments into the dataclass `config`.

    Every field is an option `--field`, nested dataclasses by dots; `--config FILE` reads YAML, later arguments win.
    `positional` names one field that is given without a dash, and may be left out where it has a default. The class
    docstring is the help text.

    Raises:
        ValueError: unknown option, wrong type, unreadable file, or a value the dataclass refuses.
    """
    parser = Parser(prog=prog, description=inspect.cleandoc(config.__doc__ or ""), formatter_class=Formatter)
    parser.add_argument("--config", action="config", help="YAML file with any of the options below.")
    if positional is not None:
        default = next(field.default for field in fields(config) if field.name == positional)  # type: ignore[arg-type]
        optional = {} if default in (MISSING, "") else {"nargs": "?", "default": default}
        parser.add_argument(positional, type=str, **optional)
    parser.add_class_arguments(config, as_group=False, skip={positional} if positional else set())
    for action in parser._actions:
        if getattr(action, "_typehint", None) is bool:  # --dry_run alone means true
            action.nargs, action.const = "?", True
    _check_files(args)
    return _instantiate(parser, config, parser.parse_args(args))


def _check_files(args: Sequence[str] | None) -> None:
    """Name the --config file that is no mapping of options: jsonargparse would not."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", action="append", default=[])
    for path in parser.parse_known_args(args)[0].config:
        try:
            values = yaml.safe_load(Path(path).read_bytes())
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}") from error
        except yaml.YAMLError as error:
            raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path}: expected a mapping of options, got {values!r}")


def from_mapping(config: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """The dataclass `config` from nested mappings, as YAML and JSON hold them, with the checks of a command line.

    Raises:
        ValueError: as `parse`, with `where` before the option's name.
    """
    parser = _mapping_parser(config)  # type: ignore[arg-type]  # a class is hashable
    try:
        return _instantiate(parser, config, parser.parse_object(dict(values)))
    except ValueError as error:
        raise ValueError(f"{where}{error}") from error


@cache
def _mapping_parser(config: type[Any]) -> Parser:
    parser = Parser(prog=config.__name__)
    parser.add_class_arguments(config, as_group=False)
    return parser


def _instantiate(parser: Parser, config: type[T], values: Namespace) -> T:
    _check(config, values)
    found = parser.instantiate(values).as_dict()
    found.pop("config", None)
    return config(**found)


def _check(config: type[Any], values: Namespace, before: str = "") -> None:
    """Refuse what jsonargparse takes from YAML: null for any type, and anything for a group of options."""
    for name, kind in get_type_hints(config).items():
        value = values.get(name)
        if is_dataclass(kind):
            if not isinstance(value, Namespace):
                raise ValueError(f"{before}{name}: expected a mapping of options, got {value!r}")
            _check(kind, value, f"{before}{name}.")  # type: ignore[arg-type]  # a class, since it comes from the hints
        elif value is None and type(None) not in get_args(kind):
            raise ValueError(f"{before}{name}: null; leave it out for the default")


def at_least(config: object, **bounds: int) -> None:
    """Raise ValueError, by name, for a field of a number below its bound; None passes."""
    for name, bound in bounds.items():
        value = getattr(config, name)
        if value is not None and value < bound:
            raise ValueError(f"{name}: {value}; needs at least {bound}")


def run(main: Callable[[], None]) -> NoReturn:
    """Call `main` and exit: 0 when done, 2 with one line on stderr for ValueError and OSError, 130 for Ctrl-C.

    Under a launcher the other ranks give rank 0 two seconds to speak first: the launcher ends them when it has.
    `VCAGEN_TRACEBACK=1` shows the traceback as well.
    """
    try:
        main()
    except (ValueError, OSError) as error:
        if os.environ.get("VCAGEN_TRACEBACK"):
            traceback.print_exc()
        rank = int(os.environ.get("RANK", "0"))
        if rank:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(2)
        message = re.sub(r"\s*\n\s*", " ", str(error)) or type(error).__name__
        print(f"error{f' (rank {rank})' if rank else ''}: {message}", file=sys.stderr, flush=True)
        _leave(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        _leave(130)
    raise SystemExit(0)


def _leave(code: int) -> NoReturn:
    """Exit at once: interpreter shutdown would wait for worker threads and process groups."""
    sys.stdout.flush()
    os._exit(code)
