"""Host tensors that a tower keeps and copies to its device in each call, as VideoMAE does with its positions.

`meta` stands in for a GPU. On the CPU, the same function reads copies that nobody else writes to.
"""

import functools

import pytest
import torch

import varlen_graphs as vg
from tests.support.multimodal import random, tower_model
from tests.support.towers import distance, equal_bits
from varlen_graphs.recipes.modes.cached_tables import cached_tables, reads_copies, why_changed
from varlen_graphs.recipes.probe import itself
from varlen_graphs.torch_dispatch.rules_mode import CaptureRulesMode

META = torch.device("meta")
PATH = "embeddings.position_embeddings was changed"


def video(device="cpu"):
    """Return VideoMAE, its tables on the host, and a function of it that reads copies of these."""
    tower = tower_model("VideoMAEModel").to(device)
    tables = [*cached_tables(tower, META)]
    assert [table.path for table in tables] == ["embeddings.position_embeddings"]
    return tower, tables, reads_copies(tables, itself(tower.forward))


def test_a_forward_on_a_gpu_copies_nothing_from_the_host():
    tower, _, function = video("meta")
    x = torch.empty(2, 4, 3, 16, 16, device="meta")
    rules = CaptureRulesMode(META, "it")
    with pytest.raises(vg.errors.CaptureError, match=r"copies a host tensor to the device(.|\n)*modeling_videomae.py"):
        rules.watch(lambda: tower(x))
    function(tower, pixel_values=x)  # as a warm-up, which copies the table
    assert rules.watch(lambda: function(tower, pixel_values=x)).last_hidden_state.is_meta


def test_other_host_tensors_are_still_refused():
    tower, tables, function = video("meta")
    tower.embeddings.position_embeddings = tables[0].tensor * 2
    with pytest.raises(vg.errors.CaptureError, match="copies a host tensor to the device"):
        CaptureRulesMode(META, "it").watch(
            lambda: function(tower, pixel_values=torch.empty(2, 4, 3, 16, 16, device=META))
        )


def test_towers_on_the_host_and_registered_buffers_have_no_tables():
    tower, tables, _ = video()
    assert not [*cached_tables(tower, torch.device("cpu"))]
    tower.embeddings.position_embeddings = None
    tower.embeddings.register_buffer("table", tables[0].tensor)
    assert not [*cached_tables(tower, META)]


def replace(tower):
    tower.embeddings.position_embeddings = tower.embeddings.position_embeddings * 2


def write(tower):
    tower.embeddings.position_embeddings[:, 0] += 1


def write_to_a_view(tower):
    tower.embeddings.position_embeddings.detach().mul_(2)


@pytest.mark.parametrize("change", [replace, write, write_to_a_view])
def test_calls_after_a_change_run_eager_and_say_so(change, recwarn):
    tower, tables, function = video()
    spec = vg.recipes.by_batch(tower, [1, 4], backend="tape").spec
    encoder = vg.GraphedEncoder(
        tower, [1, 4], spec, forward=function, eager_if=functools.partial(why_changed, tables), backend="tape"
    )
    x = random(3, 4, 3, 16, 16)
    encoder.capture()
    encoder.poison()
    assert distance(encoder(x), tower(x)) < 1e-5
    assert not encoder.stats.eager
    assert not [one for one in recwarn if "graphs read" in str(one.message)]
    before = function(tower, pixel_values=x)
    change(tower)
    assert equal_bits(function(tower, pixel_values=x), before) == (change is not replace)  # what graphs would read
    assert distance(encoder(x), tower(x)) < 1e-5
    assert distance(tower(x), before) > 1e-2
    (reason,) = encoder.stats.eager
    assert reason.startswith(PATH)
