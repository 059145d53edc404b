"""A sentence for the case that Ray ends this process: it does so, at once, when this machine's part of it is lost.

A tiny process waits at the other end of a pipe. If the pipe closes without a goodbye, it prints the sentence. What was
saved is intact, as after any kill.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress

_WAIT = "import sys; sys.stdin.buffer.read() or print(sys.argv[1], file=sys.stderr)"


class LastWords:
    def __init__(self, sentence: str):
        # A session of its own: Ctrl-C is not for it.
        command = [sys.executable, "-I", "-S", "-c", _WAIT, sentence]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )

    def not_needed(self) -> None:
        with suppress(OSError, subprocess.TimeoutExpired):
            self._process.communicate(b"goodbye", timeout=5)
