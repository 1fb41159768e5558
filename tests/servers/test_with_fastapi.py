"""The FastAPI server, under load from real clients on the loopback."""

import gc
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers

pytest.importorskip("fastapi", reason="needs fastapi and uvicorn")
pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")
if transformers.__version__.startswith("4."):
    pytest.skip("the example makes tokenizers as transformers 5 does", allow_module_level=True)

import uvicorn

from examples.servers import device, with_fastapi
from tests.servers.clients import BODIES, free_port, is_right, load, page, png, post, wait_for

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = [*(ROOT / "examples" / "servers").glob("*.py")]


@pytest.fixture(scope="module")
def server():
    """The address of a server in this process, with a short queue."""
    patch = pytest.MonkeyPatch()
    patch.setattr(with_fastapi, "WAITING", 16)
    patch.setattr(torch.backends.cudnn, "allow_tf32", False)  # what runs eager on a GPU convolves, and graphs do not
    port = free_port()
    running = uvicorn.Server(uvicorn.Config(with_fastapi.app, port=port, log_level="warning"))
    thread = threading.Thread(target=running.run)
    thread.start()
    wait_for(lambda: running.started or not thread.is_alive())
    yield f"http://127.0.0.1:{port}"
    running.should_exit = True
    thread.join(60)
    assert not thread.is_alive()
    patch.undo()


def batcher(name):
    return with_fastapi.app.state.batchers[name]


@contextmanager
def held(name):
    """Keep a model from answering, in the block at most."""
    release = threading.Event()
    batcher(name).thread.submit(release.wait)
    try:
        yield release
    finally:
        release.set()


def replays(name):
    return sum(encoder.stats.replays.total() for encoder in batcher(name).model.captures)


def test_answers_under_load_are_right_from_the_first_second_and_graphs_come(server):
    assert load(server) == []
    for name, bodies in BODIES.items():

        def replayed(name=name, bodies=bodies):
            status, answer = post(f"{server}/{name}", bodies[0])
            assert status == 200
            assert is_right(name, 0, answer["answer"])
            return replays(name) > 0

        wait_for(replayed)
    assert load(server, seed=1) == []
    text = page(f"{server}/metrics")
    for name in BODIES:
        assert f'varlen_graphs_budget_replays_total{{encoder="{name}",worker="{os.getpid()}"' in text
    assert text.count("# TYPE varlen_graphs_calls_total counter") == 1


def test_requests_that_wait_together_are_answered_in_one_call(server, monkeypatch):
    model, read, arrived = batcher("sentences").model, batcher("sentences").model.read, []
    monkeypatch.setattr(model, "read", lambda body: arrived.append(body) or read(body))
    before = sum(encoder.stats.calls for encoder in model.captures)
    with ThreadPoolExecutor(8) as clients, held("sentences") as release:
        answers = [clients.submit(post, f"{server}/sentences", BODIES["sentences"][at % 5]) for at in range(8)]
        wait_for(lambda: len(arrived) == 8)
        release.set()
        for at, answer in enumerate(answers):
            assert is_right("sentences", at % 5, answer.result()[1]["answer"])
    assert sum(encoder.stats.calls for encoder in model.captures) - before <= 3


def test_what_is_too_much_is_turned_away_and_the_rest_answered(server):
    with ThreadPoolExecutor(40) as clients, held("sentences") as release:
        answers = [clients.submit(post, f"{server}/sentences", BODIES["sentences"][0]) for _ in range(40)]
        wait_for(lambda: sum(answer.done() for answer in answers) >= 40 - 16 - 8)
        release.set()
        statuses = [answer.result()[0] for answer in answers]
    assert {*statuses} == {200, 503}
    assert 16 <= statuses.count(200) <= 16 + 8


@pytest.mark.parametrize("name", ["images", "chat"])
def test_a_bad_request_is_refused_alone(server, name):
    assert post(f"{server}/{name}", b"no image") == (
        400, {"detail": "the body is no image that can be read: expected a PNG or JPEG file"}
    )  # fmt: skip
    status, answer = post(f"{server}/{name}", png(4000, 8))
    assert status == 400
    assert "aspect ratio" in answer["detail"]
    bomb = b"P1 20000 20000\n0"  # as large as a picture may not be
    assert post(f"{server}/{name}", bomb)[0] == 400
    assert post(f"{server}/sentences", b"\xff\xfe")[0] == 400
    assert post(f"{server}/unknown", b"")[0] == 422
    assert load(server, count=10, seed=2) == []


def test_a_client_that_leaves_disturbs_no_other(server):
    with held("sentences"), pytest.raises(TimeoutError):
        post(f"{server}/sentences", BODIES["sentences"][0], timeout=0.3)
    assert load(server, count=10, seed=3) == []


def test_an_error_of_a_model_is_answered_and_the_gpu_looked_at(server, monkeypatch):
    def fail(texts):
        raise RuntimeError("CUDA error: device-side assert triggered")

    looked = []
    monkeypatch.setattr(batcher("sentences").model, "answer", fail)
    monkeypatch.setattr(with_fastapi, "end_if_broken", lambda: looked.append(True))
    with pytest.raises(ValueError, match="Expecting value"):  # no JSON
        post(f"{server}/sentences", BODIES["sentences"][0])
    assert looked == [True]


def test_a_process_ends_when_its_gpu_has_failed_and_only_then(monkeypatch):
    ended = []
    monkeypatch.setattr("os._exit", ended.append)
    monkeypatch.setattr(device, "DEVICE", "cuda")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    device.end_if_broken()
    assert not ended

    def broken():
        raise torch.AcceleratorError("CUDA error: device-side assert triggered", 710)

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    device.end_if_broken()
    assert ended == [1]


def test_a_model_is_loaded_anew_while_it_answers(server):
    old = [weakref.ref(batcher(name).model) for name in BODIES]
    with ThreadPoolExecutor(1) as traffic:
        wrong = traffic.submit(load, server, 60, 4)
        for name in BODIES:
            assert post(f"{server}/{name}/reload")[0] == 200
        assert wrong.result() == []

    def gone():
        gc.collect()
        return all(model() is None for model in old)

    wait_for(gone)
    assert load(server, count=20, seed=5) == []


def test_the_examples_are_short():
    assert all(len(example.read_text().splitlines()) < 100 for example in EXAMPLES)
