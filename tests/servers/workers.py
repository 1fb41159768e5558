"""The workers of the FastAPI server, of uvicorn or gunicorn: `make test-offline`, because they take long to start."""

import os
import signal
import subprocess
import sys
import threading
import urllib.error
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

import pytest

from tests.servers.clients import BODIES, free_port, load, post, wait_for

ROOT = Path(__file__).parent.parent.parent

UVICORN = ["examples.servers.with_fastapi", "--workers=2", "--port={port}"]
GUNICORN = [
    "gunicorn",
    "examples.servers.with_fastapi:app",
    "--worker-class=asgi",
    "--workers=2",
    "--bind=127.0.0.1:{port}",
]


@pytest.mark.parametrize(
    "module", [UVICORN, GUNICORN, [*GUNICORN, "--preload"]], ids=["uvicorn", "gunicorn", "gunicorn, preloaded"]
)
def test_a_worker_that_dies_is_replaced_and_the_end_is_clean(module):
    pytest.importorskip(module[0].partition(".")[0], reason="needs gunicorn")
    port = free_port()
    command = [sys.executable, "-m", *(part.format(port=port) for part in module)]
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE, text=True
    ) as own:
        log = []
        reader = threading.Thread(target=lambda: log.extend(own.stderr))
        reader.start()
        try:
            server = f"http://127.0.0.1:{port}"

            def patient(url, body):
                """Ask again where a worker died."""
                answers = []

                def answered():
                    with suppress(urllib.error.URLError, HTTPException, ConnectionError):
                        answers.append(post(url, body))
                    return answers

                wait_for(answered)
                return answers[0]

            def workers():
                return {patient(f"{server}/sentences", BODIES["sentences"][0])[1]["worker"] for _ in range(20)}

            wait_for(lambda: len(workers()) == 2)
            dead = min(workers())
            os.kill(dead, signal.SIGKILL)
            assert load(server, count=20, send=patient) == []
            wait_for(lambda: len(workers() - {dead}) == 2)
            own.send_signal(signal.SIGTERM)
            assert own.wait(60) in (0, -signal.SIGTERM)
        finally:
            own.kill()
            reader.join()
    assert "Traceback" not in "".join(log)
