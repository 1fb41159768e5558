"""Scripts in processes of their own, which are forked off one that has imported what scripts begin with."""

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

from tests.support import scripts

SERVER = """
import json, os, sys

for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if child == 0:
        for stream, path in ((1, asked["stdout"]), (2, asked["stderr"])):
            os.dup2(os.open(path, os.O_WRONLY), stream)
        exec(asked["code"], globals())
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    os._exit(0)
"""
"""Runs the scripts it is asked for; in a child it ends as they end, as a program of that code would."""

SECONDS = 240


@functools.cache
def _server():
    code = "import torch.utils.data\n" + textwrap.dedent(scripts.PRELUDE) + SERVER
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, start_new_session=True, **pipes)


def run_script(*parts, ends=(0,)):
    """Run a script that begins with `PRELUDE`, and return the words it printed and its standard error.

    `ends` are the exit statuses it may end with; None stands for any.
    """
    if not hasattr(os, "fork"):
        return scripts.run_script(*parts, ends=ends)
    server, code = _server(), "".join(map(textwrap.dedent, parts))
    with tempfile.TemporaryDirectory() as folder:
        streams = {name: f"{folder}/{name}" for name in ("stdout", "stderr")}
        for path in streams.values():
            Path(path).touch()
        end = threading.Timer(SECONDS, os.killpg, (server.pid, signal.SIGKILL))
        end.start()
        try:
            server.stdin.write(json.dumps({"code": code, **streams}) + "\n")
            server.stdin.flush()
            status = server.stdout.readline()
        finally:
            end.cancel()
        printed, errors = (Path(path).read_text() for path in streams.values())
    if not status:
        _server.cache_clear()
        raise TimeoutError(f"the script took more than {SECONDS} s: {errors}")
    assert ends is None or int(status) in ends, errors
    return printed.split(), errors
