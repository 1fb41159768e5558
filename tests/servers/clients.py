"""HTTP clients of the servers, and the answers of the models themselves."""

import io
import json
import random
import socket
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import SimpleNamespace

import numpy
import torch
from PIL import Image

from examples.servers.models import Chat, Patches
from examples.servers.weights import DEVICE, sentence_transformer, tower, vision_language_model

TEXTS = [
    "a graph",
    "some rows of an item " * 3,
    "x",
    "bucket and padding",
    "a text that is longer than the others " * 2,
]
SIZES = [(40, 40), (64, 96), (120, 80), (96, 96), (33, 70)]
CLIENTS = 8


def png(height, width):
    """Return an image file."""
    pixels = numpy.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=numpy.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


BODIES = {"images": [png(*size) for size in SIZES], "sentences": [text.encode() for text in TEXTS]}
BODIES["chat"] = BODIES["images"]


@cache
def expected(name):
    """Return the answer to each body, from the model as it is, called with that alone."""
    if name == "sentences":
        model = sentence_transformer()
        return [model.encode([text])[0].tolist() for text in TEXTS]
    inputs = list(map(Patches().read, BODIES[name]))
    with torch.inference_mode():
        if name == "images":
            model = tower()
            outputs = [
                model(one["pixel_values"].to(DEVICE), grid_thw=one["image_grid_thw"].to(DEVICE)) for one in inputs
            ]
            return [output.pooler_output.mean(0).tolist() for output in outputs]
        chat = SimpleNamespace(model=vision_language_model())
        return [Chat.generate(chat, **one) for one in inputs]


def post(url, body=b"", timeout=60):
    """Return the status and the JSON of a response."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, method="POST"), timeout=timeout) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def page(url):
    with urllib.request.urlopen(url, timeout=60) as response:
        return response.read().decode()


def free_port():
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return own.getsockname()[1]


def wait_for(done, seconds=60):
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.1)


def is_right(name, at, answer):
    return numpy.allclose(answer, expected(name)[at], rtol=1e-4, atol=1e-4)


def load(server, count=60, seed=0, send=post):
    """Send requests of all kinds from several clients at once, and return those that came back wrong, and how."""
    for name in BODIES:
        expected(name)
    dice = random.Random(seed)
    wanted = [(name := dice.choice([*BODIES]), dice.randrange(len(BODIES[name]))) for _ in range(count)]

    def one(request):
        name, at = request
        status, answer = send(f"{server}/{name}", BODIES[name][at])
        if status != 200:
            return f"{name} {at}: {status} {answer}"
        off = numpy.abs(numpy.subtract(answer["answer"], expected(name)[at])).max()
        return None if is_right(name, at, answer["answer"]) else f"{name} {at}: off by {off}"

    with ThreadPoolExecutor(CLIENTS) as clients:
        return [*filter(None, clients.map(one, wanted))]
