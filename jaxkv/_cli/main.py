"""The command line: `python -m jaxkv generate` and `python -m jaxkv plan`."""

import argparse
import os
import sys

import jax

from jaxkv import __version__
from jaxkv._cli.generate import add_generate
from jaxkv._cli.plan_command import add_plan
from jaxkv._core.config.validation import show
from jaxkv._core.state.errors import CacheError


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jaxkv", description=__doc__)
    parser.add_argument("--version", action="version", version=f"jaxkv {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    add_generate(commands)
    add_plan(commands)
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments)
    except BrokenPipeError:  # the reader closed the output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout at exit
        return 141
    except UnicodeEncodeError as error:  # the terminal's input is no valid text
        half = error.object[error.start : error.end]
        print(f"jaxkv: {show(error.object)} holds {half!a}, which is no character: write it in UTF-8.", file=sys.stderr)
        return 2
    except (ValueError, OSError, ModuleNotFoundError, CacheError) as error:  # errors that a user can fix
        print(f"jaxkv: {error}", file=sys.stderr)
        return 2
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).splitlines()[0]
        print(
            f"jaxkv: There is not enough memory ({reason}): give --memory, or less of what is large.", file=sys.stderr
        )
        return 2
    except KeyboardInterrupt:
        return 130
