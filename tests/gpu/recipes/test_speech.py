"""Speech encoders of transformers on real CUDA graphs."""

import pytest
import torch

from tests.support.contract import check_half_precision
from tests.support.gpu import on_gpus

pytest.importorskip("transformers", minversion="5.20", reason="needs the masks of transformers 5")

from tests.support.speech_models import (
    ALONE,
    RAGGED,
    SQUEEZED,
    check_clips,
    check_squeezed,
    clips,
    speech_encoder,
    speech_model,
)

pytestmark = on_gpus()


@pytest.fixture(autouse=True)
def _whole_precision(monkeypatch):
    """Convolutions of other sizes round otherwise to TF32, which is no difference to look for."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("name", [*RAGGED, *ALONE])
def test_clips_are_as_the_model_has_them(name):
    encoder = speech_encoder(name, speech_model(name).cuda(), backend="cuda")
    check_clips(encoder, 1e-4)
    assert encoder.alone == (name in ALONE)


@pytest.mark.parametrize("name", SQUEEZED)
def test_models_that_squeeze_frames(name):
    check_squeezed(speech_encoder(name, speech_model(name).cuda(), backend="cuda"), 1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["wav2vec2 large", "wav2vec2 base", "parakeet"])
def test_half_precision_is_about_as_exact_as_the_model(name, dtype):
    exact, model = speech_model(name).cuda(), speech_model(name, dtype).cuda()
    encoder = speech_encoder(name, model, backend="cuda", verify=0)
    for seed in range(3):
        call = clips(encoder, [300, 300], seed=seed)
        rows = call[encoder.spec.row_input.name]
        with torch.no_grad():
            outs = [
                run(rows.to(to)).last_hidden_state
                for run, to in ((encoder, dtype), (model, dtype), (exact, torch.float32))
            ]
        check_half_precision(*outs, dtype)
    assert not encoder.stats.eager
