"""The Ray Serve example, under load from real clients on the loopback: `make test-offline`."""

import os
import signal
import subprocess
import sys
import threading
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs ray[serve]")

from tests.servers.clients import BODIES, free_port, is_right, load, page, post, wait_for

ROOT = Path(__file__).parent.parent.parent
PATH = os.pathsep.join([str(ROOT), *filter(None, sys.path)])


def patient(url, body):
    """Ask again where a replica died, or none has started."""
    answers = []

    def answered():
        with suppress(urllib.error.URLError, HTTPException, ConnectionError, ValueError):
            answers.append(post(url, body))
        return answers and answers[-1][0] == 200

    wait_for(answered, 120)
    return answers[-1]


@pytest.fixture(scope="module")
def server():
    """The address of a server with two replicas of each model, which ends when it is told to."""
    port = free_port()
    command = [sys.executable, "-m", "examples.servers.with_ray_serve", "--port", str(port), "--replicas", "2"]
    environment = os.environ | {"PYTHONPATH": PATH, "RAY_AUTH_MODE": "disabled"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as own:
        log = []
        reader = threading.Thread(target=lambda: log.extend(own.stdout))
        reader.start()
        try:
            for name, bodies in BODIES.items():
                patient(f"http://127.0.0.1:{port}/{name}", bodies[0])
            yield f"http://127.0.0.1:{port}"
            own.send_signal(signal.SIGTERM)
            assert own.wait(90) == 0, "".join(log)
        finally:
            own.kill()
            reader.join(10)


def workers(server):
    return {patient(f"{server}/sentences", BODIES["sentences"][0])[1]["worker"] for _ in range(30)}


def test_answers_under_load_are_right_and_graphs_come(server):
    assert load(server) == []
    for name, bodies in BODIES.items():

        def replayed(name=name, bodies=bodies):
            assert is_right(name, 0, post(f"{server}/{name}", bodies[0])[1]["answer"])
            counts = [line for line in page(f"{server}/{name}").splitlines() if "budget_replays_total{replica=" in line]
            return any(float(line.rsplit(" ", 1)[1]) for line in counts)

        wait_for(replayed)
    assert load(server, seed=1) == []


def test_a_bad_request_is_refused_alone(server):
    with ThreadPoolExecutor(4) as clients:
        bad = clients.submit(page_of_error, f"{server}/images", b"no image")
        assert load(server, count=20, seed=2) == []
    assert bad.result() == (400, "the body is no image that can be read: expected a PNG or JPEG file")


def page_of_error(url, body):
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(urllib.request.Request(url, body, method="POST"), timeout=60)
    return raised.value.code, raised.value.read().decode()


def test_a_replica_that_dies_is_replaced(server):
    wait_for(lambda: len(workers(server)) == 2)
    dead = min(workers(server))
    os.kill(dead, signal.SIGKILL)
    assert load(server, count=30, seed=3, send=patient) == []
    wait_for(lambda: len(workers(server) - {dead}) == 2)


def test_a_model_is_loaded_anew_while_it_answers(server):
    before = workers(server)
    code = "import ray; ray.init('auto'); from examples.servers.with_ray_serve import deploy; deploy('sentences', 2)"
    environment = os.environ | {"PYTHONPATH": PATH, "RAY_AUTH_MODE": "disabled"}
    with ThreadPoolExecutor(1) as traffic:
        wrong = traffic.submit(load, server, 100, 4)
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180
        )
        assert done.returncode == 0, done.stderr
        assert wrong.result() == []
    wait_for(lambda: not before & workers(server))
    assert load(server, count=20, seed=5) == []
