"""Requests a second behind HTTP of a tower, a whole model and a SentenceTransformer: as they are, wrapped, from pixels.

Run with `python -m benchmarks.serving`. The server is the one of the standard library, a thread a connection; requests
that wait together are answered in one call, at most 8. Clients are another process, on the same machine, and each sends
its next request when it has an answer. A tower gets JPEG files of 640 x 480, and answers with the mean of its features;
a whole model gets the same, generates 8 tokens, and answers with logits of the first one; a SentenceTransformer gets
short texts. The first answers are compared with those of the model as it is, one by one.
"""

import argparse
import io
import json
import pickle
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

import varlen_graphs as vg
from benchmarks.common import WrongResultError, facts, headline, percentile, table, write_json
from benchmarks.generate import TOKENS, make_model, make_prompt
from benchmarks.load import Client
from benchmarks.pixels import make_image, make_processor
from benchmarks.sentences import load, save, sentences
from benchmarks.systems import make_tower

MOST, CLIENTS, BODIES = 8, (1, 8, 32), 16
"""Requests that one call answers, numbers of clients, and different requests."""

TEXT_ARGUMENTS = "input_ids", "attention_mask", "mm_token_type_ids"
"""Arguments of a prompt that have a line for each request."""

LIMIT = 5e-2
"""Relative L2 between right answers in bfloat16, which depend on the batch."""


class Model(NamedTuple):
    """Something to serve. `read` makes a request of a body, `answer` the vectors of several requests."""

    read: Callable[[bytes], Any]
    answer: Callable[[Sequence[Any]], Tensor]


class Server(ThreadingHTTPServer):
    """Answers requests to a model."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, model: Model) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.model = model
        self.waiting: SimpleQueue[tuple[Any, Future[Any]]] = SimpleQueue()
        for run in (self.serve_forever, self.answer_all):
            threading.Thread(target=run, daemon=True).start()

    def answer_all(self) -> None:
        """Answer all requests that wait, in one call."""
        while True:
            batch = [self.waiting.get()]
            with suppress(Empty):
                while len(batch) < MOST:
                    batch.append(self.waiting.get_nowait())
            try:
                answers: Sequence[Any] = self.model.answer([request for request, _ in batch]).tolist()
            except Exception as error:
                for _, future in batch:
                    future.set_exception(error)
            else:
                for (_, future), answer in zip(batch, answers, strict=True):
                    future.set_result(answer)


class Handler(BaseHTTPRequestHandler):
    """A connection of a client."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def do_POST(self) -> None:
        """Answer a request with a vector."""
        request = self.server.model.read(self.rfile.read(int(self.headers["Content-Length"])))
        future: Future[Any] = Future()
        self.server.waiting.put((request, future))
        body = json.dumps(future.result()).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


# Models


def image(body: bytes) -> Any:
    """Decode a JPEG file."""
    from PIL import Image

    return Image.open(io.BytesIO(body)).convert("RGB")


def processed(processor: Any, body: bytes) -> tuple[Tensor, Tensor]:
    """Return the patches of a JPEG file, and their grid."""
    made = processor(image(body), return_tensors="pt")
    return made["pixel_values"], made["image_grid_thw"]


def photographs() -> list[bytes]:
    """JPEG files of 640 x 480."""
    bodies = []
    for seed in range(BODIES):
        make_image(480, 640, seed).save(file := io.BytesIO(), "JPEG", quality=90)
        bodies.append(file.getvalue())
    return bodies


@contextmanager
def towers() -> Iterator[tuple[dict[str, Model], list[bytes]]]:
    """The tower of the 8B Qwen3-VL."""
    tower, processor = make_tower("8b", torch.bfloat16), make_processor()
    pixels = vg.recipes.qwen3_vl(tower, normalize=vg.inputs.Patches.of(processor))
    process = partial(processed, processor)

    def answer(encode: Callable[..., Any], requests: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        rows, grid = (torch.cat(part) for part in zip(*requests, strict=True))
        with torch.inference_mode():
            features = encode(rows.cuda(), grid).pooler_output
            return torch.stack([part.float().mean(0) for part in features.split((grid.prod(1) // 4).tolist())])

    def eager(rows: Tensor, grid: Tensor) -> Any:
        return tower(rows.bfloat16(), grid_thw=grid.cuda())

    wrapped = vg.recipes.qwen3_vl(tower)
    systems = {
        "as it is": Model(process, lambda requests: answer(eager, requests)),
        "wrapped": Model(
            process, lambda requests: answer(lambda rows, grid: wrapped(rows.bfloat16(), grid_thw=grid), requests)
        ),
        "from pixels": Model(
            lambda body: tuple(pixels.read_images(image(body)).values()),
            lambda requests: answer(lambda rows, grid: pixels(rows, grid_thw=grid), requests),
        ),
    }
    yield systems, photographs()


@contextmanager
def chats() -> Iterator[tuple[dict[str, Model], list[bytes]]]:
    """A whole Qwen3-VL-2B, which generates tokens about images of one size."""
    processor = make_processor()

    def served(model: Any) -> Model:
        def answer(requests: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
            rows, grid = (torch.cat(part) for part in zip(*requests, strict=True))
            prompt = make_prompt([tuple(grid[0].tolist())])
            prompt = {name: value.expand(len(grid), -1) for name, value in prompt.items() if name in TEXT_ARGUMENTS}
            prompt |= {"pixel_values": rows.to("cuda", torch.bfloat16), "image_grid_thw": grid.cuda()}
            options = {"max_new_tokens": TOKENS, "do_sample": False, "return_dict_in_generate": True}
            made = model.generate(**prompt, **options, output_logits=True)
            logits: Tensor = made.logits[0][:, :64].float()
            return logits

        return Model(partial(processed, processor), answer)

    yield {"as it is": served(make_model()), "wrapped": served(vg.wrap(make_model()))}, photographs()


@contextmanager
def texts() -> Iterator[tuple[dict[str, Model], list[bytes]]]:
    """A model of MiniLM-L6's size in float16."""
    corpus = sentences()
    with tempfile.TemporaryDirectory() as folder:
        save(folder, corpus)
        models = {"as it is": load(folder, torch.float16), "wrapped": vg.wrap(load(folder, torch.float16))}

    def served(model: Any) -> Model:
        def answer(requests: Sequence[str]) -> Tensor:
            vectors: Tensor = model.encode([*requests], convert_to_tensor=True, show_progress_bar=False)
            return vectors.float()

        return Model(bytes.decode, answer)

    yield {name: served(model) for name, model in models.items()}, [text.encode() for text in corpus[:BODIES]]


def main() -> None:
    """Run the benchmark, print it, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {**facts(), "rows": []}
    for served, make in (("Qwen3-VL-8B's tower", towers), ("Qwen3-VL-2B", chats), ("MiniLM-L6", texts)):
        with make() as (systems, bodies):
            result["rows"] += [{"served": served, **row} for row in run(systems, bodies, options.seconds)]
        write_json(options.json, result)
    print(headline(result))
    header = ("served", "system", "clients", "requests_s", "p50_ms", "p99_ms", "error")
    print(table(header, [[row[key] for key in header] for row in result["rows"]]))


def run(systems: dict[str, Model], bodies: list[bytes], seconds: float) -> list[dict[str, Any]]:
    """Serve each system, check its answers, and load it with each number of clients."""
    own = systems["as it is"]
    expected = torch.cat([own.answer([own.read(body)]) for body in bodies]).cpu()
    servers = {name: Server(model) for name, model in systems.items()}
    errors = {name: _error(server, bodies, expected) for name, server in servers.items()}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        (file := Path(folder) / "bodies").write_bytes(pickle.dumps(bodies))
        for clients in CLIENTS:  # before any is measured, because batches of new sizes are captured
            for server in servers.values():
                _load(server, clients, seconds / 3, file)
        for clients in CLIENTS:
            for name, server in servers.items():
                times = _load(server, clients, seconds, file)
                row = {"system": name, "clients": clients, "requests_s": len(times) / seconds}
                quantiles = {"p50_ms": statistics.median(times), "p99_ms": percentile(times, 0.99)}
                rows.append({**row, **quantiles, "error": errors[name]})
    for server in servers.values():
        server.shutdown()
    return rows


def _error(server: Server, bodies: list[bytes], expected: Tensor) -> float:
    """Return how far the answers of a server are off.

    Raises:
        WrongResultError: Too far.
    """
    client = Client(server.server_port)
    answers = torch.tensor([client.post(body) for body in bodies])
    error = ((answers - expected).norm() / expected.norm()).item()
    if not error <= LIMIT:
        raise WrongResultError(f"answers differ by {error:.1e}: not timed")
    return error


def _load(server: Server, clients: int, seconds: float, file: Path) -> list[float]:
    """Return the milliseconds of the requests of so many clients."""
    command = [sys.executable, "-m", "benchmarks.load", *map(str, (server.server_port, clients, seconds, file))]
    times: list[float] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return times


if __name__ == "__main__":
    main()
