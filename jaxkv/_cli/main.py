"""The command line: `python -m jaxkv generate` and `python -m jaxkv plan`."""

import argparse
import sys

from jaxkv import __version__
from jaxkv._cli.generate import add_generate
from jaxkv._cli.plan_command import add_plan


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jaxkv", description=__doc__)
    parser.add_argument("--version", action="version", version=f"jaxkv {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    add_generate(commands)
    add_plan(commands)
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments)
    except (ValueError, FileNotFoundError, ModuleNotFoundError) as error:  # what a user can mend
        print(f"jaxkv: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
