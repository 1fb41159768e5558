"""Serve wrapped models with Ray Serve: replicas with graphs of their own, on as many machines as there are.

    python -m examples.servers.with_ray_serve                 # from the project's root
    curl --data-binary @photograph.jpg localhost:8000/images  # or /chat
    curl --data-binary "some text" localhost:8000/sentences

Requests that come together are answered in one call. `GET` of the same address gives the metrics of a replica, for
Prometheus. A deployment that outgrows a machine needs no other code: `ray start` on the others, and more `--replicas`.
Deploying a name again loads its model anew, while the replicas that there are answer; Ray replaces what dies.
"""

import argparse
import asyncio
import os
import signal
from contextlib import suppress

from ray import serve
from starlette.requests import Request
from starlette.responses import PlainTextResponse

import varlen_graphs as vg
from examples.servers.device import DEVICE, end_if_broken
from examples.servers.models import MODELS

MOST, WAITING = 8, 64  # requests that one call answers, and those that may wait for a replica


@serve.deployment(
    max_ongoing_requests=2 * MOST,
    max_queued_requests=WAITING,
    ray_actor_options={"num_gpus": int(DEVICE == "cuda"), "num_cpus": 0},
    graceful_shutdown_timeout_s=10,
)
class Replica:
    """A model, its graphs, and the thread that calls it."""

    def __init__(self, name):
        self.name, self.model = name, MODELS[name]()

    async def __call__(self, request: Request):
        if request.method == "GET":
            replica = serve.get_replica_context().replica_id.unique_id
            return PlainTextResponse(vg.stats.prometheus(self.model.encoders(self.name), replica=replica))
        try:
            read = await asyncio.to_thread(self.model.read, await request.body())
        except ValueError as error:
            return PlainTextResponse(str(error), status_code=400)
        return {"answer": await self.answer(read), "worker": os.getpid()}

    @serve.batch(max_batch_size=MOST, batch_wait_timeout_s=0.002)
    async def answer(self, requests):
        try:
            return await asyncio.to_thread(self.model.answer, requests)
        except Exception:
            end_if_broken()
            raise

    def __del__(self):
        self.model.stop()


def deploy(name, replicas):
    """Deploy a model, or load it anew."""
    deployment = Replica.options(num_replicas=replicas).bind(name)
    return serve.run(deployment, name=name, route_prefix=f"/{name}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--replicas", type=int, default=1, help="of each model")
    options = parser.parse_args()
    serve.start(http_options={"port": options.port})
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray's own ends the process at once
    with suppress(KeyboardInterrupt):
        for name in MODELS:
            deploy(name, options.replicas)
        signal.pause()
    serve.shutdown()
