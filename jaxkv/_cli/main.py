"""The command line: `python -m jaxkv generate`, `chat`, `plan`, `serve` and `demo`."""

import importlib
import os
import sys

from jaxkv import __version__
from jaxkv._cli.option_names import OptionParser, name_options
from jaxkv._cli.options import add_chat, add_demo, add_generate, add_plan, add_serve


def main(argv: list[str] | None = None) -> int:
    parser = OptionParser(prog="python -m jaxkv", description=__doc__)
    parser.add_argument("--version", action="version", version=f"jaxkv {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for add in (add_generate, add_chat, add_plan, add_serve, add_demo):
        add(commands)
    arguments = parser.parse_args(argv)
    arguments.generate = lambda options: main(["generate", *options])
    module, name = arguments.run.split(":")
    try:
        return getattr(importlib.import_module(module), name)(arguments)
    except BrokenPipeError:  # the reader closed the output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout at exit
        return 141
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
        print(f"jaxkv: {name_options(message, arguments.options)}", file=sys.stderr)
        return 2


def explain(error: Exception) -> str | None:
    """Returns the sentence for an error that a user can mend; None for another."""
    import jax

    from jaxkv._core.config.validation import show
    from jaxkv._core.state.errors import CacheError

    if isinstance(error, UnicodeEncodeError):  # the terminal's input is no valid text
        half = error.object[error.start : error.end]
        return f"{show(error.object)} holds {half!a}, which is no character: write it in UTF-8."
    if isinstance(error, ValueError | OSError | ModuleNotFoundError | CacheError):
        return str(error)
    if isinstance(error, MemoryError) or (
        isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    ):
        reason = str(error).splitlines()[0] if str(error) else "MemoryError"
        return f"There is not enough memory ({reason}): give --memory, or less of what is large."
    return None
