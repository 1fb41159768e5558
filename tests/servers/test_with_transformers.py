"""The server of transformers, started with its models wrapped: chat requests with images over HTTP."""

import pytest
import torch
import transformers

pytest.importorskip("transformers.cli.serving.model_manager", reason="needs the server of transformers 5")
pytest.importorskip("openai", reason="needs transformers[serving]")
pytest.importorskip("fastapi", reason="needs transformers[serving]")

import varlen_graphs as vg
from tests.servers.chat import check_answers
from tests.servers.clients import wait_for
from varlen_graphs.__main__ import main
from varlen_graphs.huggingface.serve import wrap_loaded


def test_answers_are_those_of_the_server_as_it_is_and_graphs_replay(tmp_path):
    check_answers(tmp_path, "cpu")


def test_a_model_without_a_tower_is_served_as_it_is(capsys):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=9)).eval()
    assert wrap_loaded(model, "tape") == {}
    assert "LlamaForCausalLM is served as it is: LlamaForCausalLM has no tower" in capsys.readouterr().err
    assert wrap_loaded(model, "cuda") == {}
    assert "its weights are on cpu, graphs of CUDA are for GPUs" in capsys.readouterr().err
    assert not vg.encoders(model)


def test_models_of_one_class_have_metrics_of_their_own_and_errors_are_logged(caplog, monkeypatch):
    def model():
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = transformers.CLIPVisionConfig(**sizes, image_size=32, patch_size=8)
        return transformers.CLIPVisionModel(config).eval().requires_grad_(False)

    models = model(), model()
    first, second = (wrap_loaded(one, "tape", f"org/clip@{at}") for at, one in enumerate(models))
    assert not first.keys() & second.keys()
    (encoder,) = first.values()

    def fail(*_, **__):
        raise vg.errors.CaptureError("no room")

    monkeypatch.setattr(encoder.executor.store, "capture", fail)
    models[0](torch.zeros(1, 3, 32, 32))  # requests a graph
    wait_for(lambda: "CLIPVisionModel in the background have ended: no room" in caplog.text)


def test_other_commands_take_no_unknown_arguments(capsys):
    with pytest.raises(SystemExit):
        main(["demo", "--port", "1"])
    assert "unrecognized arguments: --port 1" in capsys.readouterr().err
