"""Scripts in processes of their own."""

import os
import subprocess
import sys
import textwrap
import threading
from contextlib import contextmanager

PRELUDE = """
    import os, sys, threading, time
    import torch
    import varlen_graphs as vg
    from tests.support.encoders import Attention, attention_encoder, attention_spec

    spec = attention_spec(rows=vg.inputs.Rows("x", shape=(8,)))
    rows = torch.ones(6, 8)

    class Slow(Attention):
        capturing = threading.Event()

        def forward(self, x, cu_seqlens, max_seqlen, scale=1.0):
            if len(x) > 6:
                self.capturing.set()
                time.sleep(0.05)
            return super().forward(x, cu_seqlens, max_seqlen, scale)
"""
"""Beginning of scripts: rows, a declaration, and a module whose captures take some time."""


def run_script(*parts, prelude=PRELUDE, ends=(0,)):
    """Run a script, and return the words it printed and its standard error.

    `ends` are the exit statuses it may end with; None stands for any.
    """
    command, environment = _command(prelude, *parts)
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert ends is None or done.returncode in ends, done.stderr
    return done.stdout.split(), done.stderr


@contextmanager
def started_script(*parts, prelude=PRELUDE, seconds=100, **variables):
    """Start a script, to talk to over its pipes; it is killed at the end of the block, or after some seconds."""
    command, environment = _command(prelude, *parts)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment | variables, **pipes) as process:
        end = threading.Timer(seconds, process.kill)
        end.start()
        try:
            yield process
        finally:
            end.cancel()
            process.kill()


def _command(*parts):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return [sys.executable, "-c", "".join(map(textwrap.dedent, parts))], environment
