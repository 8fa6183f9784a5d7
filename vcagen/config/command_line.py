"""Command lines from dataclasses, by jsonargparse; a user's mistake is one line and exit code 2."""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import os
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import is_dataclass, replace
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace, set_loader, set_parsing_settings
from yaml import YAMLError

from vcagen.system.files import parse_yaml, prefixing, read_yaml

T = TypeVar("T")

RENAMED = {
    "run": "run_dir", "objective": "process", "objective.name": "process.name", "codec": "vae", "codec.vae": "vae.path",
    "objective.num_timesteps": "process.num_timesteps", "codec.precision": "vae.precision",
    "codec.tiling": "vae.tiling", "model.patch_size": "model.size",
}  # fmt: skip
"""Options of earlier versions, and what they are called now."""

set_parsing_settings(docstring_parse_attribute_docstrings=True)
set_loader("as written", parse_yaml, exceptions=(YAMLError, ValueError))


class Formatter(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """jsonargparse's help, with the lines of the description kept."""


class Parser(ArgumentParser):
    """jsonargparse's parser with one-line errors, no abbreviations, and the nearest valid name for an unknown one."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "parser_mode": "as written", **kwargs})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise ValueError(self._one_line(message))

    def _one_line(self, message: str) -> str:
        names = [option.lstrip("-") for action in self._actions for option in action.option_strings or [action.dest]]
        if stray := re.search(r"unrecognized arguments: ([^-]\S*)", message):
            return f"{stray[1]}: not expected; options begin with --"
        unknown = re.search(r"unrecognized arguments: -*([\w.]+)", message)
        nested = re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", message)
        plain = re.search(r"Option '([\w.]+)' is not accepted", message)
        if found := unknown or nested or plain:
            name = ".".join(found.groups())
            near = [RENAMED[name]] if RENAMED.get(name) in names else difflib.get_close_matches(name, names, n=1)
            near = near or difflib.get_close_matches(name.rsplit(".", 1)[-1], names, n=1)
            return f"{name}: unknown option" + (f"; did you mean {near[0]}?" if near else "")
        message = re.sub(r'^Parser key "([\w.]+)":', r"\1:", message.strip())
        key = message.split(":", 1)[0]
        given = re.search(r"(?:Given|Got) value: (.*)", message) or re.search(
            r"Not of type \w+: (?:invalid literal for int\(\) with base 10: |could not convert string to float: |"
            r"\w+\(\) argument must be .* not )?"
            r"'?(.*?)'?(?: does not conform to restriction .*|$)", message
        )  # fmt: skip
        if not given:
            return re.sub(r"\s+", " ", message)
        hints = [getattr(action, "_typehint", None) or action.type for action in self._actions if action.dest == key]
        expected = " or ".join(word for hint in hints for word in _words(hint)) or "a mapping of options"
        return f"{key}: expected {expected}, got {given.group(1)!r}"


def _words(hint: Any) -> list[str]:
    """What a type hint admits, in words."""
    if hint is None or hint is type(None):
        return ["null"]
    if get_origin(hint) is Literal:
        return [str(value) for value in get_args(hint)]
    if get_origin(hint) in (Union, UnionType):
        return [word for part in get_args(hint) for word in _words(part)]
    if get_origin(hint) is None and isinstance(hint, type):
        restriction = re.search(r"^(\w+) restricted to be (.*)$", hint.__doc__ or "")
        return [" ".join(restriction.groups()) if restriction else hint.__name__]
    if get_origin(hint) in (list, tuple):
        kind = "list" if get_origin(hint) is list else "pair"
        return [f"a {kind} of {' or '.join(_words(get_args(hint)[0]))}"]
    return [str(hint)]


def parse(config: type[T], args: Sequence[str] | None = None, *, prog: str) -> T:
    """Parse command-line arguments into the dataclass `config`.

    Every field is an option `--field`, nested dataclasses by dots; `--config FILE` reads YAML, later arguments win. A
    class attribute `positional` names the field that is given without a dash. A field `given` becomes the names of the
    options that were given. Modules named by `--plugin` are imported. The class docstring is the help text.

    Raises:
        ValueError: unknown option, wrong type, unreadable file, a plugin that cannot be imported, or a value the
            dataclass refuses.
    """
    parser = Parser(prog=prog, description=inspect.cleandoc(config.__doc__ or ""), formatter_class=Formatter)
    parser.add_argument(
        "--config", action="config", help="YAML file with any of the options below, or the name of a packaged one."
    )
    positional = getattr(config, "positional", ())
    positional = {positional: None} if isinstance(positional, str) else dict.fromkeys(positional)
    for name in positional:
        parser.add_argument(name, type=str)
    parser.add_class_arguments(config, as_group=False, skip={*positional, "given"})
    for action in parser._actions:
        if getattr(action, "_typehint", None) is bool:  # --dry_run alone means true
            action.nargs, action.const = "?", True
    args = _find_configs(sys.argv[1:] if args is None else args)
    parsed = _instantiate(parser, config, parser.parse_args(args))
    for module in filter(None, (getattr(parsed, "plugin", None) or "").split(",")):
        _import(module.strip())
    if hasattr(parsed, "given"):
        names = parser.parse_args(args, defaults=False).keys()  # dotted
        parsed = replace(parsed, given=frozenset(names) - {"config"})  # type: ignore[type-var]
    return parsed


def find_config(name: str) -> str:
    """Path of a YAML file: `name` itself, or the packaged configuration called so, such as quickstart."""
    package = Path(__file__).parent.parent
    packaged = [folder / "configs" / f"{name}.yaml" for folder in (package, package.parent)]  # a wheel, a clone
    return str(next((path for path in (Path(name), *packaged) if path.exists()), name))


def _find_configs(args: Sequence[str]) -> list[str]:
    """The arguments with the paths of the --config files, which must be mappings of options."""
    args = list(args)
    for i, argument in enumerate(args):
        if argument == "--config" and i + 1 < len(args):
            args[i + 1] = path = find_config(args[i + 1])
        elif argument.startswith("--config="):
            path = find_config(argument.removeprefix("--config="))
            args[i] = f"--config={path}"
        else:
            continue
        if not isinstance(values := read_yaml(path), dict):
            raise ValueError(f"{path}: expected a mapping of options, got {values!r}")
    return args


def from_mapping(config: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """The dataclass `config` from nested mappings, as YAML and JSON hold them, with the checks of a command line.

    Raises:
        ValueError: as `parse`, with `where` before the option's name.
    """
    parser = _mapping_parser(config)  # type: ignore[arg-type]  # a class is hashable
    with prefixing(where):
        return _instantiate(parser, config, parser.parse_object(deepcopy(dict(values))))  # it changes them


@cache
def _mapping_parser(config: type[Any]) -> Parser:
    parser = Parser(prog=config.__name__)
    parser.add_class_arguments(config, as_group=False)
    return parser


def _instantiate(parser: Parser, config: type[T], values: Namespace) -> T:
    _check(config, values)
    found = parser.instantiate(_expand(values)).as_dict()
    found.pop("config", None)
    return config(**found)


def _expand(value: Any) -> Any:
    """Options with the home folder for ~ where a path begins, also behind the name of a set of images (NAME:~/FOLDER).

    A shell does that for words that begin with it, but not in YAML, nor behind --run_dir=.
    """
    if isinstance(value, str):
        return re.sub(r"(^|:)~(?=/|$)", lambda found: found[1] + str(Path.home()), value)
    if isinstance(value, Namespace):
        return Namespace({key: _expand(part) for key, part in value.items()})  # type: ignore[no-untyped-call]
    return [_expand(part) for part in value] if isinstance(value, list) else value


def _check(config: type[Any], values: Namespace, before: str = "") -> None:
    """Refuse what jsonargparse takes from YAML: null for any type, and anything for a group of options."""
    for name, kind in get_type_hints(config).items():
        if name not in values:  # not an option
            continue
        value = values[name]
        if is_dataclass(kind):
            if not isinstance(value, Namespace):
                raise ValueError(f"{before}{name}: expected a mapping of options, got {value!r}")
            _check(kind, value, f"{before}{name}.")  # type: ignore[arg-type]  # a class, since it comes from the hints
        elif value is None and type(None) not in get_args(kind):
            raise ValueError(f"{before}{name}: null; leave it out for the default")


def _import(module: str) -> None:
    """Import a user's module, from the working folder too."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever a user's module does
        raise ValueError(f"plugin: {module}: cannot be imported ({type(error).__name__}: {error})") from error
    finally:
        sys.path.pop(0)


def make_named(option: str, name: str) -> Any:
    """What the callable `module.path:name`, the value of an option, makes.

    Raises:
        ValueError: no such module or callable, or one that fails.
    """
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{option}: {name}: {error}; needs module.path:callable") from error


TOO_LARGE = re.compile(r"(?i)out of memory|allocate memory|overflow")
"""In the messages of PyTorch's errors about sizes."""


def run(main: Callable[[], None]) -> NoReturn:
    """Call `main` and exit: 0 when done, 2 with one line on stderr for a user's mistake, 130 for Ctrl-C.

    Mistakes are ValueError, OSError, and what comes of numbers that are too large for the machine. Warnings of other
    libraries are shown in the end, and not where a mistake says what is wrong. Names that are not UTF-8 are escaped.

    Under a launcher the other ranks give rank 0 two seconds to speak first: the launcher ends them when it has.
    `VCAGEN_TRACEBACK=1` shows the traceback as well.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a file, in a process of its own
    warned: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as warned:
            main()
    except Exception as error:
        message = re.sub(r"\s*\n\s*", " ", str(error)) or type(error).__name__
        if not isinstance(error, ValueError | OSError):
            if not isinstance(error, MemoryError | OverflowError) and not TOO_LARGE.search(message):
                raise
            message = f"an option is too large for this machine ({message:.160})"
        warned = []
        if os.environ.get("VCAGEN_TRACEBACK"):
            traceback.print_exc()
        rank = int(os.environ.get("RANK", "0"))
        if rank:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(2)
        print(f"error{f' (rank {rank})' if rank else ''}: {message}", file=sys.stderr, flush=True)
        _leave(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        _leave(130)
    finally:
        for warning in warned:
            print(warnings.formatwarning(warning.message, warning.category, warning.filename, warning.lineno),
                  file=sys.stderr, end="")  # fmt: skip
    raise SystemExit(0)


def _leave(code: int) -> NoReturn:
    """Exit at once: interpreter shutdown would wait for worker threads and process groups."""
    sys.stdout.flush()
    os._exit(code)
