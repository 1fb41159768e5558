"""A small LLaVA, behind the server of transformers as it is and with wrapped models."""

import base64
import json
import os
import re
import signal
import string
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.servers.clients import free_port, page, png, wait_for

ROOT = Path(__file__).parent.parent.parent
SIZES = [(60, 70), (40, 90), (56, 56), (100, 30)]
BACKEND = {"cpu": ["--backend", "tape"], "cuda": []}
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endfor %}"
)


def save_tokenizer(folder):
    """A tokenizer whose tokens are letters."""
    special = ["<pad>", "<unk>", "<s>", "</s>", "<image>"]
    vocabulary = {token: at for at, token in enumerate([*special, *string.printable[:95]])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    names = dict(zip(("pad_token", "unk_token", "bos_token", "eos_token"), special, strict=False))
    own = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **names, extra_special_tokens={"image_token": "<image>"}
    )
    own.save_pretrained(folder)
    return own, len(vocabulary)


def save_model(folder):
    """A small LLaVA and its processor."""
    tokenizer, size = save_tokenizer(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**sizes, image_size=56, patch_size=14),
        text_config=transformers.LlamaConfig(**sizes, vocab_size=size, pad_token_id=0, bos_token_id=2, eos_token_id=3),
        image_token_id=4,
    )
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(3)  # so that answers depend on the image
    model.generation_config.update(do_sample=False, max_new_tokens=8, eos_token_id=None)
    model.save_pretrained(folder)
    name = "CLIPImageProcessorPil" if hasattr(transformers, "CLIPImageProcessorPil") else "CLIPImageProcessor"
    images = getattr(transformers, name)(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    transformers.LlavaProcessor(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="default", image_token="<image>",
        num_additional_image_tokens=1, chat_template=TEMPLATE,
    ).save_pretrained(folder)  # fmt: skip


@contextmanager
def served_as_it_is(model, device):
    """Start the server of transformers for a model in this process, and return its address."""
    from transformers.cli.serve import Serve

    port = free_port()
    server = Serve(str(model), device=device, port=port, non_blocking=True)
    wait_for(lambda: server.server.started)
    yield f"http://127.0.0.1:{port}"
    server.kill_server()


@contextmanager
def served_wrapped(model, log, device):
    """Start the server with wrapped models, and return its address; it must end by SIGINT."""
    port = free_port()
    arguments = ["varlen_graphs", "serve", *BACKEND[device], str(model), "--device", device, "--port", str(port)]
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments], stdout=output, stderr=output, env=os.environ | {"PYTHONPATH": paths}
        )
    try:
        wait_for(lambda: process.poll() is not None or "running on" in log.read_text(), 90)
        assert process.poll() is None, log.read_text()
        yield f"http://127.0.0.1:{port}"
        process.send_signal(signal.SIGINT)
        process.wait(30)
    finally:
        process.kill()


def ask(address, model, size):
    """Return the answer to one image."""
    image = f"data:image/png;base64,{base64.b64encode(png(*size)).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": "what is it?"}]
    body = {"model": str(model), "max_tokens": 8, "messages": [{"role": "user", "content": parts}]}
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def check_answers(tmp_path, device):
    """Compare the answers of both servers, and count replays."""
    save_model(chat_model := tmp_path / "llava")
    with served_as_it_is(chat_model, device) as address:
        expected = [ask(address, chat_model, size) for size in SIZES]
    assert len(set(expected)) > 1
    log = tmp_path / "log"
    with served_wrapped(chat_model, log, device) as address:
        assert ask(address, chat_model, SIZES[0]) == expected[0]

        def replays():
            metrics = page(f"{address}/metrics")
            return sum(float(count) for count in re.findall(r"budget_replays_total\{.*\} (\S+)", metrics))

        def has_replayed():
            return ask(address, chat_model, SIZES[0]) == expected[0] and replays() > 0

        wait_for(has_replayed, 60)
        before = replays()
        with ThreadPoolExecutor(4) as clients:
            answers = clients.map(lambda size: ask(address, chat_model, size), SIZES * 3)
            assert [*answers] == expected * 3
        assert replays() >= before + len(SIZES * 3)
    assert "varlen_graphs: model.vision_tower: CLIPVisionModel, graphed by by_batch" in log.read_text()
