"""The command `hopflow`."""

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from hopflow import demo
from hopflow.config import config
from hopflow.export.commands import add_commands
from hopflow.testing import fuzz, speed
from hopflow.testing.requires import missing


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status.

    0 means success, 1 that results of a demo or of programs disagree or that programs
    differ, 2 a wrong use of the command, an error of hopflow or a missing library, 130
    that Ctrl-C ended it.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    status: int = options.run(options)
    return status


def _demo(options: argparse.Namespace) -> int:
    if lacking := demo.missing_libraries():
        return _lacks("demo", ", ".join(lacking), "demo")
    return 0 if demo.run(options.output) else 1


def _fuzz(options: argparse.Namespace) -> int:
    if lacking := [name for name in ("hypothesis", "rich") if missing(name)]:
        return _lacks("fuzz", ", ".join(lacking), "test")
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=options.output).close()
    except OSError as error:  # fail now, not when there is a result to save
        print(
            f"hopflow fuzz: nothing can be written to {options.output} "
            f"({error.strerror}). Name another folder by `--output`.",
            file=sys.stderr,
        )
        return 2
    config.cache_dir = ""  # what is compared has to be compiled
    endless = math.inf if options.programs else 1.0
    limit = fuzz.Limit(options.minutes or endless, options.programs or math.inf)
    if options.speed:
        if missing("jax"):
            return _lacks("fuzz --speed", "jax", "test")
        return speed.show(limit, options.seed, options.output, options.factor)
    profiles = options.profile or fuzz.PROFILES
    return fuzz.show(limit, options.seed, options.output, profiles)


def _lacks(command: str, lacking: str, extra: str) -> int:
    print(
        f"hopflow {command}: {lacking} must be installed first:\n"
        f"    pip install 'hopflow[{extra}]'",
        file=sys.stderr,
    )
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hopflow",
        description="Data-dependent control flow, first class in array programs.",
    )
    parser.add_argument(
        "--version", action="version", version=f"hopflow {version('hopflow')}"
    )
    commands = parser.add_subparsers(dest="command", metavar="command")
    add_commands(commands)
    about = "k-means with the operators: its graph, checks, times and a picture"
    demonstration = commands.add_parser("demo", help=about, description=about)
    demonstration.add_argument(
        "--output",
        type=Path,
        default=Path("demo_output"),
        metavar="FOLDER",
        help="where the picture goes (default: %(default)s)",
    )
    demonstration.set_defaults(run=_demo)
    about = "draw programs, and compare all their executions"
    fuzzing = commands.add_parser("fuzz", help=about, description=about)
    fuzzing.add_argument(
        "--minutes",
        type=_positive,
        metavar="N",
        help="how long (default: 1, or until `--programs`)",
    )
    fuzzing.add_argument(
        "--programs",
        type=_count,
        metavar="N",
        help="how many programs (default: as many as there is time for)",
    )
    fuzzing.add_argument(
        "--profile",
        action="append",
        choices=fuzz.PROFILES,
        help="what is compared; may be given again (default: all, in turn)",
    )
    fuzzing.add_argument(
        "--speed",
        action="store_true",
        help="time programs beside JAX, and keep those that it runs faster",
    )
    fuzzing.add_argument(
        "--factor",
        type=_positive,
        default=1.1,
        metavar="F",
        help="with --speed: what times JAX's is too long (default: %(default)s)",
    )
    fuzzing.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="where to start: the same seeds draw the same (default: %(default)s)",
    )
    fuzzing.add_argument(
        "--output",
        type=Path,
        default=Path("fuzz_output"),
        metavar="FOLDER",
        help="where the corpus and failures go (default: %(default)s)",
    )
    fuzzing.set_defaults(run=_fuzz)
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on.")
    return int(text)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no finite number above 0.")
    return number


if __name__ == "__main__":
    sys.exit(main())
