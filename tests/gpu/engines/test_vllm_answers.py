"""Engines of vLLM with the plugin and without it answer requests with images and videos alike, on a GPU.

Two engines for each case, in processes of their own. Needs a vLLM whose extensions run here.
"""

import json
import os
import subprocess
import sys
from itertools import chain

import pytest
import torch

from tests.gpu.engines.tiny_models import write_model
from tests.support.gpu import TWO_GPUS, on_gpus
from tests.support.ranks import ROOT

pytest.importorskip("vllm", reason="vLLM is not installed")

pytestmark = on_gpus()

NEAR = 0.05
"""Largest difference of log probabilities: encoder outputs differ by the rounding of bfloat16."""

FEW = {"budgets": [256, 512, 1024, 2048, 4096]}
TRANSFORMERS = {"model_impl": "transformers"}
V1, V2 = ({"VLLM_USE_V2_MODEL_RUNNER": value} for value in "01")
COMPILED = {"compilation_config": {}}
TWO = {"tensor_parallel_size": 2, "mm_encoder_tp_mode": "data", "disable_custom_all_reduce": True}
CASES = {
    "v2": ("qwen3_vl", V2, {}),
    "v1": ("qwen3_vl", V1, {}),
    "v2-compiled": ("qwen3_vl", V2, {"options": COMPILED}),
    "v1-compiled": ("qwen3_vl", V1, {"options": COMPILED}),
    "default-budgets": ("qwen3_vl", V2, {"switch": True}),
    "prefix-cache": ("qwen3_vl", V2, {"options": {"enable_prefix_caching": True, "mm_processor_cache_gb": 1}}),
    "sleep": ("qwen3_vl", V2, {"options": {"enable_sleep_mode": True}, "then": "sleep"}),
    "reload": ("qwen3_vl", V2, {"then": "reload"}),
    "qwen2_5_vl": ("qwen2_5_vl", V2, {}),
    "qwen2_5_vl-v1": ("qwen2_5_vl", V1, {}),
    "glm4v": ("glm4v", V2, {}),
    "glm4v-v1": ("glm4v", V1, {}),
    "two-gpus": ("qwen3_vl", V2, {"options": TWO}),
    "two-gpus-v1": ("qwen3_vl", V1, {"options": TWO}),
    "two-gpus-qwen2_5_vl": ("qwen2_5_vl", V2, {"options": TWO}),
    "transformers-qwen3_vl": ("qwen3_vl", V2, {"options": TRANSFORMERS, "switch": True}),
    "transformers-llava": ("llava", V2, {"options": TRANSFORMERS, "switch": True}),
    "transformers-gemma3": ("gemma3", V2, {"options": TRANSFORMERS, "switch": True}),
}


def answer(folder, case, environment):
    """Start an engine that answers, with its log beside the answers."""
    folder.mkdir()
    command = [sys.executable, "-m", "tests.gpu.engines.vllm_answers", json.dumps(case), str(folder)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    with (folder / "log.txt").open("w") as log:
        return subprocess.Popen(
            command, cwd=ROOT, env=os.environ | environment | {"PYTHONPATH": path}, stdout=log, stderr=subprocess.STDOUT
        )


@pytest.mark.parametrize("name", [pytest.param(one, marks=TWO_GPUS if "two" in one else ()) for one in CASES])
def test_answers_are_those_of_the_engine_as_it_is(name, tmp_path):
    kind, environment, more = CASES[name]
    write_model(kind, tmp_path / kind)
    cases = {"without": {"kind": kind, **more, "switch": None}, "with": {"kind": kind, "switch": FEW, **more}}
    engines = {name: answer(tmp_path / name, case, environment) for name, case in cases.items()}
    for name, engine in engines.items():
        assert engine.wait(timeout=400) == 0, (tmp_path / name / "log.txt").read_text()[-4000:]
    without, ours = (torch.load(tmp_path / name / "answers.pt") for name in cases)
    assert without["v2"] == ours["v2"] == (environment is V2)
    assert without["answers"][0]["logprobs"] != without["answers"][1]["logprobs"]  # images matter
    for before, now in zip(without["answers"], ours["answers"], strict=True):
        shared = before["logprobs"].keys() & now["logprobs"].keys()
        assert max(abs(before["logprobs"][token] - now["logprobs"][token]) for token in shared) < NEAR
        chosen = before["logprobs"][now["tokens"][0]]  # random weights make near ties
        assert chosen > before["logprobs"][before["tokens"][0]] - 2 * NEAR
    for before, now in zip(chain(*without["embedded"]), chain(*ours["embedded"]), strict=True):
        assert ((now - before).norm() / before.norm()).item() < 2e-2  # two right kernels in bfloat16
    allowed = {"larger than every budget"}  # vLLM embeds several requests at once
    for of_worker in ours["stats"]:
        assert of_worker
        for replays, eager in of_worker.values():
            assert replays
            assert allowed.issuperset(eager), eager
