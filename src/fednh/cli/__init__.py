"""The command line. Every command imports what it needs inside itself, so that `fednh --help` answers at once.

A command lives in the module named after what it is about; each module adds its commands to `app`, which has their
order in `fednh --help`.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from typing import Any

import typer

from fednh.cli import (  # noqa: F401 (each adds its commands to `app`)
    about,
    attack,
    features,
    federation,
    figures,
    inspect,
    models,
    recommend,
    run,
    sweep,
    tables,
    watch,
)
from fednh.cli.app import app
from fednh.errors import Ignored, Notice, UserError


def main() -> None:
    """Entry point: a UserError is one sentence on stderr and its exit code; what is not foreseen names itself."""
    _print_warnings()
    _print_interrupt()
    try:
        sys.exit(app(standalone_mode=False))
    except UserError as error:
        _fail(str(error), error.exit_code)
    except OSError as error:
        _fail(f"{error.filename or 'the file system'}: {error.strerror or error}; what was saved before is intact", 2)
    except MemoryError:
        _fail("out of memory; use fewer --workers, a smaller train.batch_size or store.memory", 1)
    except Exception as error:
        if hasattr(error, "format_message"):  # the parser's own: an unknown option, a word where a number should be
            _usage(error)
        if os.environ.get("FEDNH_DEBUG"):
            raise
        _fail(f"{type(error).__name__}: {error} (set FEDNH_DEBUG=1 to see where)", 1)


def _print_interrupt() -> None:
    """Ctrl-C is one sentence and exit code 130; commands that save before they stop have a handler of their own."""

    def tell(_: int, __: object) -> None:
        typer.echo("fednh: interrupted; a file that was not complete was not written", err=True)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # in the background of a shell it is ignored
        signal.signal(signal.SIGINT, tell)


def _print_warnings() -> None:
    """Print a run's own warnings (Ignored, Notice) like every other message; leave other warnings as they are."""
    show_default = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
        if issubclass(category, Ignored | Notice):
            typer.echo(f"fednh: {message}", err=True)
        else:
            show_default(message, category, *rest, **more)

    warnings.showwarning = show


def _usage(error: Any) -> None:
    if not error.args and not getattr(error, "message", ""):  # no command given: the help is the answer
        error.show()
        sys.exit(error.exit_code)
    where = getattr(getattr(error, "ctx", None), "command_path", "fednh")
    _fail(f"{error.format_message().rstrip('.')}; see `{where} --help`", 2)


def _fail(sentence: str, code: int) -> None:
    typer.echo(f"fednh: {' '.join(sentence.split())}", err=True)
    sys.exit(code)
