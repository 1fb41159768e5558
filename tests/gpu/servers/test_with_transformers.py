"""The server of transformers with wrapped models, on a GPU."""

import pytest

from tests.support.gpu import on_gpus

pytest.importorskip("transformers.cli.serving.model_manager", reason="needs the server of transformers 5")
pytest.importorskip("openai", reason="needs transformers[serving]")
pytest.importorskip("fastapi", reason="needs transformers[serving]")

from tests.servers.chat import check_answers

pytestmark = on_gpus()


def test_answers_are_those_of_the_server_as_it_is_and_graphs_replay(tmp_path):
    check_answers(tmp_path, "cuda")
