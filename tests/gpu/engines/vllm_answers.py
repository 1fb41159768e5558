"""An engine of vLLM in a process of its own: `python -m tests.gpu.engines.vllm_answers CASE FOLDER`.

CASE is JSON: `kind` of model, `switch` (that of the plugin, or null), `options` of the engine, and `then`: what happens
between two rounds of the same requests. Writes `answers.pt` into FOLDER, with the model in `FOLDER/../KIND`.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process fewer to start
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # of the functions that look at the model of a worker
os.environ.setdefault("VLLM_ALLREDUCE_USE_SYMM_MEM", "0")  # needs multicast between GPUs

import numpy as np
import torch
from PIL import Image
from vllm import LLM, SamplingParams

import varlen_graphs as vg
from tests.gpu.engines.tiny_models import IMAGES, VIDEO

SIZES = [(96, 96), (256, 256), (400, 160), (500, 500), (300, 221)]
GRAPHS = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
SMALL = {
    "dtype": "bfloat16", "max_model_len": 2048, "max_num_batched_tokens": 4096, "max_num_seqs": 16, "seed": 0,
    "kv_cache_memory_bytes": 1 << 28, "gpu_memory_utilization": 0.02,
}  # fmt: skip


def requests_for(kind, videos):
    """Images alone, several in a request, and videos."""
    generator = np.random.default_rng(0)

    def picture(height, width):
        coarse = Image.fromarray(generator.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        return coarse.resize((width, height), Image.BICUBIC)

    def video(frames, height, width):
        about = {"fps": 2.0, "duration": frames / 2, "total_num_frames": frames, "frames_indices": [*range(frames)]}
        about |= {"video_backend": "opencv", "do_sample_frames": False}
        return np.stack([np.asarray(picture(height, width)) for _ in range(frames)]), about

    def request(images=(), clips=()):
        places = " ".join([*[IMAGES[kind]] * len(images), *[VIDEO] * len(clips)])
        data = {"image": [*images], "video": [*clips]}
        words = " ".join(f"word{i}" for i in range(2, 14))
        return {"prompt": f"word1 {places} {words}", "multi_modal_data": {name: of for name, of in data.items() if of}}

    requests = [request([picture(*size)]) for size in SIZES]
    requests += [request([picture(*size) for size in some]) for some in (SIZES[:3], SIZES[1:])]
    if videos:
        requests += [request(clips=[video(4, 128, 160)]), request([picture(200, 100)], [video(8, 96, 96)])]
    return requests


def answers_to(llm, requests):
    """Tokens and log probabilities, of requests one by one and then all at once."""
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=8)
    found = [llm.generate([one], sampling, use_tqdm=False)[0] for one in requests]
    found += llm.generate(requests, sampling, use_tqdm=False)
    return [
        {
            "tokens": [*one.outputs[0].token_ids],
            "logprobs": {token: value.logprob for token, value in one.outputs[0].logprobs[0].items()},
        }
        for one in found
    ]


def sleep(llm):
    """Free the weights, those of the second time for good."""
    llm.sleep(level=1)
    llm.wake_up()
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    llm.collective_rpc("reload_weights")
    llm.wake_up(tags=["kv_cache"])


def reload(llm):
    """Load the weights again, and forget what vLLM has of the old ones."""
    llm.collective_rpc("reload_weights")
    llm.llm_engine.reset_mm_cache()
    llm.llm_engine.reset_encoder_cache()


def record(model):
    """Keep what the model embeds."""
    embed, model.embedded = model.embed_multimodal, []

    def recorded(**arguments):
        made = embed(**arguments)
        model.embedded.extend(one.float().cpu() for one in made)
        return made

    model.embed_multimodal = recorded


def embedded_by(model):
    """Return what the model embedded."""
    return model.embedded


def stats_of(model):
    """Return how often graphs of the model were replayed, and which calls ran eager, by encoder."""
    stats = {path: one.stats for path, one in vg.encoders(model).items()}
    return {path: (one.replays.total(), dict(one.eager)) for path, one in stats.items()}


def main(case, folder):
    """Answer, and write what came."""
    kind, options, switch = case["kind"], case.get("options", {}), case["switch"]
    videos = kind.startswith("qwen") and "model_impl" not in options
    options = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}, **SMALL, **options}
    options["compilation_config"] |= GRAPHS
    options["limit_mm_per_prompt"] = {"image": 4} | ({"video": int(videos)} if "model_impl" not in options else {})
    if switch is not None:
        options["additional_config"] = {"varlen_graphs": switch}
    llm = LLM(model=str(folder.parent / kind), **options)
    llm.apply_model(record)
    requests = requests_for(kind, videos)
    answers = answers_to(llm, requests)
    if "then" in case:
        globals()[case["then"]](llm)
        answers += answers_to(llm, requests)
    found = {
        "answers": answers,
        "embedded": llm.apply_model(embedded_by),
        "v2": bool(llm.llm_engine.vllm_config.use_v2_model_runner),
        "stats": llm.apply_model(stats_of),
    }
    torch.save(found, folder / "answers.pt")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
