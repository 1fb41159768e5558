"""Serve wrapped models over HTTP with FastAPI: requests that wait together are answered in one call.

    python -m examples.servers.with_fastapi --workers 2       # from the project's root
    curl --data-binary @photograph.jpg localhost:8000/images  # or /chat
    curl --data-binary "some text" localhost:8000/sentences

`GET /metrics` is for Prometheus; `POST /sentences/reload` loads a model anew while the old one answers. Each worker has
models and metrics of its own. With several, one that dies, as it does when CUDA has failed, is replaced.
"""

import argparse
import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Literal

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response

import varlen_graphs as vg
from examples.servers.device import end_if_broken
from examples.servers.models import MODELS

Name = Literal["images", "sentences", "chat"]
MOST, WAITING = 8, 64  # requests that one call answers, and those that may wait for it: more are turned away


class Batcher:
    """Answers the requests to one model in a thread of its own, all that wait in one call."""

    def __init__(self, make):
        self.make, self.model = make, make()
        self.waiting, self.thread = asyncio.Queue(WAITING), ThreadPoolExecutor(1)

    async def answer(self, body):
        try:
            request = await asyncio.to_thread(self.model.read, body)
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        if self.waiting.full():
            raise HTTPException(503, "too many requests are waiting", {"Retry-After": "1"})
        self.waiting.put_nowait((request, answer := asyncio.Future()))
        return await answer

    async def run(self):
        while True:
            batch = [await self.waiting.get()]
            batch += [self.waiting.get_nowait() for _ in range(min(MOST - 1, self.waiting.qsize()))]
            requests, futures = zip(*batch, strict=True)
            try:
                answers = await asyncio.wrap_future(self.thread.submit(self.model.answer, requests))
            except Exception as error:
                end_if_broken()
                answers = [error] * len(futures)
            for future, answer in zip(futures, answers, strict=True):
                if not future.done():
                    future.set_exception(answer) if isinstance(answer, Exception) else future.set_result(answer)

    async def reload(self):
        new = await asyncio.to_thread(self.make)
        old, self.model = self.model, new
        await asyncio.wrap_future(self.thread.submit(old.stop))  # after the call that it answers


@asynccontextmanager
async def lifespan(app):
    app.state.batchers = {name: Batcher(make) for name, make in MODELS.items()}
    tasks = [asyncio.create_task(batcher.run()) for batcher in app.state.batchers.values()]
    yield
    for task, batcher in zip(tasks, app.state.batchers.values(), strict=True):
        task.cancel()
        batcher.thread.submit(batcher.model.stop).result()


app = FastAPI(lifespan=lifespan)


@app.get("/metrics")
async def metrics():
    encoders = {at: one for name, each in app.state.batchers.items() for at, one in each.model.encoders(name).items()}
    return Response(vg.stats.prometheus(encoders, worker=os.getpid()), media_type="text/plain")


@app.post("/{name}")
async def answer(name: Name, request: Request):
    return {"answer": await app.state.batchers[name].answer(await request.body()), "worker": os.getpid()}


@app.post("/{name}/reload")
async def reload(name: Name):
    await app.state.batchers[name].reload()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--workers", type=int, default=1)
    uvicorn.run("examples.servers.with_fastapi:app", timeout_worker_healthcheck=60, **vars(parser.parse_args()))
