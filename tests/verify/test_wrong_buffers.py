"""A wrong buffer is named, with the value that it should have."""

import cProfile
import pstats
import re
import sys
import warnings

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import rows_for


class Videos(nn.Module):
    """Centres the rows of each frame and scales them by frame; takes what it needs, or computes it from the items."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)

    def forward(self, x, grid_thw, cu_seqlens=None, scale=None):
        if cu_seqlens is None:
            frames = (grid_thw[:, 1] * grid_thw[:, 2]).repeat_interleave(grid_thw[:, 0])
            cu_seqlens = nn.functional.pad(frames.cumsum(0), (1, 0)).int()
        if scale is None:
            scale = grid_thw[:, 0].float().repeat_interleave(grid_thw.prod(1))
        return centred(self, x, cu_seqlens, scale)


def centred(module, x, cu_seqlens, scale):
    rows = torch.arange(len(x), dtype=torch.int32, device=x.device)
    frame = torch.searchsorted(cu_seqlens[1:].contiguous(), rows, right=True).clamp(max=len(cu_seqlens) - 2)
    x = torch.where((rows < cu_seqlens[-1])[:, None], module.linear(x), 0)
    sums = x.new_zeros(len(cu_seqlens) - 1, 8).index_add(0, frame, x)
    return (x - sums[frame] / cu_seqlens.diff().clamp(min=1)[frame][:, None]) * scale[:, None]


def scale_of(factor):
    return vg.buffers.DeviceBuffer("scale", lambda table: table.t[table.row_item].float() * factor, any_segments=False)


def encoder_of(per="frame", factor=1.0, declared_by="user", **options):
    buffers = [vg.buffers.CuSeqlens(per=per), scale_of(factor)]
    spec = vg.BufferSpec(vg.inputs.Rows("x", (8,)), vg.GridTHW(), buffers, declared_by=declared_by)
    budgets = [vg.budgets.Budget(64, items=4, segments=16)]
    return vg.GraphedEncoder(Videos().eval(), budgets, spec, backend="tape", **options)


def message_of(encoder):
    """Return what the first call says, as a warning or as an error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            encoder(rows_for([24, 4]), grid_thw=[(2, 3, 4), (1, 2, 2)])
        except vg.errors.SpecError as error:
            return str(error)
    return "\n".join(str(warning.message) for warning in caught)


FORWARDS = [{}, {"forward": centred}, {"forward": centred, "declared_by": "recipe"}]


@pytest.mark.parametrize("options", FORWARDS, ids=["the module", "a function", "a function, the module answers"])
@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({}, []),
        ({"per": "item"}, ["cu_seqlens"]),
        ({"factor": 2.0}, ["scale"]),
    ],
    ids=["none", "one of integers", "one of numbers"],
)
def test_each_wrong_buffer_is_named(wrong, named, options):
    message = message_of(encoder_of(**wrong, **options))
    assert [name for name in ("cu_seqlens", "scale") if f"Buffer '{name}' is wrong" in message] == named
    assert bool(message) == bool(named)


def test_two_wrong_buffers_are_named_both():
    message = message_of(encoder_of(per="item", factor=2.0, forward=centred))
    assert "Buffer 'cu_seqlens' is wrong: it is [0, 24, 28], where the module's own run had [0, 12, 24, 28]" in message
    assert "Buffer 'scale' is wrong" in message


def test_the_value_of_the_module_is_told():
    encoder = encoder_of(factor=2.0, forward=centred)
    expected = (
        r"'scale' is wrong: it is \[4, 4,.*where the module's own run had \[2, 2,.*, with which the output is right"
    )
    assert re.search(expected, message_of(encoder))


def test_verify_names_it_too():
    encoder = encoder_of(factor=2.0, forward=centred, verify=vg.options.Verify(at_capture=False))
    with pytest.raises(vg.errors.VerificationError, match="Buffer 'scale' is wrong"):
        encoder.verify([{"x": rows_for([24]), "grid_thw": torch.tensor([(2, 3, 4)])}])


def afterwards():
    pass


def test_a_profiler_of_the_user_goes_on_afterwards():
    with cProfile.Profile() as profile:
        assert "'scale' is wrong" in message_of(encoder_of(factor=2.0))
        afterwards()
    assert any(name == "afterwards" for *_, name in pstats.Stats(profile).stats)
    called = []

    def look(frame, event, argument):
        called.append(frame.f_code.co_name)

    sys.setprofile(look)
    try:
        message_of(encoder_of(factor=2.0))
        afterwards()
    finally:
        sys.setprofile(None)
    assert "afterwards" in called


def test_no_buffer_is_blamed_for_a_wrong_function():
    message = message_of(
        encoder_of(forward=lambda module, x, cu_seqlens, scale: -centred(module, x, cu_seqlens, scale))
    )
    assert "computes something other" in message
    assert "Buffer" not in message
