"""`Encoders`: one handle for all towers of a model."""

import re
from threading import Thread
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.towers import qwen3_vl_tower

GRID = torch.tensor([[1, 4, 4]])


@pytest.fixture
def model():
    towers = nn.ModuleDict({"first": qwen3_vl_tower(), "second": qwen3_vl_tower()})
    vg.wrap(towers, [64, 128], backend="tape")
    return towers


def rows(tower):
    return torch.randn(16, tower.patch_embed.proj.weight[0].numel())


def call(tower, pixels=None):
    return tower(rows(tower) if pixels is None else pixels, grid_thw=GRID).pooler_output


def test_all_towers_are_captured_checked_and_released(model):
    found = vg.encoders(model)
    assert found.capture() is found
    assert [len(one.executor.store) for one in found.values()] == [2, 2]
    found.check()
    held = found.bytes()
    assert held == sum(one.bytes() for one in found.values()) > 0  # tapes share no memory
    found.release()
    assert [len(one.executor.store) for one in found.values()] == [0, 0]
    assert found.bytes() < held
    call(model["first"])
    assert found.stats["first"].replays.total() == 1


def test_captures_come_again_for_the_static_arguments_that_calls_had(model):
    found = vg.encoders(model)
    call(model["first"])
    found["first"].drop_budget(64)
    found["first"].add_budget(64)
    found.capture()
    assert {*found["first"].budgets} == {
        budget for graphs in found["first"].executor.store.sets for budget in graphs.budgets
    }


def test_towers_are_verified_on_calls_of_theirs(model):
    found, tower = vg.encoders(model), model["second"]
    example = {"hidden_states": rows(tower), "grid_thw": GRID}
    verified = found.verify({"second": [example]})
    assert [*verified] == ["second"]
    with pytest.raises(vg.errors.SpecError, match=r"no encoder at \['third'\]: expected paths among"):
        found.verify({"third": [example]})


def test_an_error_says_whose_it_is(model):
    found = vg.encoders(model)
    with pytest.raises(vg.errors.InputError) as error:
        found.verify({"second": [{"hidden_states": rows(model["second"])}]})
    assert error.value.__notes__ == ["in the encoder of 'second'"]


def test_lazy_encoders_capture_in_the_background():
    towers = nn.ModuleDict({"first": qwen3_vl_tower(), "second": qwen3_vl_tower()})
    vg.wrap(towers, [64], backend="tape", capture=vg.options.Capture(lazy=True))
    futures = vg.encoders(towers).capture_in_background()
    assert [*futures] == ["first", "second"]
    for future in futures.values():
        future.cancel()


def test_metrics_of_all_towers_are_on_one_page_by_their_paths(model):
    call(model["first"])
    found = vg.encoders(model)
    page = found.prometheus(server="a")
    names = re.findall("# TYPE (.*) (?:counter|gauge)", page)
    assert len(names) == len({*names})
    assert 'varlen_graphs_calls_total{encoder="first",server="a"} 1' in page
    assert 'varlen_graphs_calls_total{encoder="second",server="a"} 0' in page
    assert 'varlen_graphs_graphs{encoder="first",server="a"} 2' in page
    assert f'varlen_graphs_bytes{{encoder="first",server="a"}} {found["first"].bytes()}' in page
    assert re.search(r'varlen_graphs_capture_seconds\{encoder="first",server="a",part="verified"\} \d', page)
    with pytest.raises(vg.errors.InputError, match="label 'encoder'"):
        found.prometheus(encoder="x")


def test_metrics_wait_for_no_capture(model):
    call(model["first"])
    first = vg.encoders(model)["first"]
    held = []

    def scrape():
        held.append(vg.stats.prometheus({"first": first}))

    with first.pool.exclusive():
        thread = Thread(target=scrape)
        thread.start()
        thread.join(10)
    assert "varlen_graphs_graphs" in held[0]
    assert "varlen_graphs_bytes" not in held[0]


def test_counters_of_towers_without_an_encoder_are_on_the_page(model):
    model["second"].train()
    call(model["second"])
    found = vg.encoders(model)
    assert "varlen_graphs_eager_total" in found.prometheus()


def test_the_report_is_a_page_too(model, tmp_path):
    call(model["first"])
    found, path = vg.encoders(model), tmp_path / "page.html"
    text = found.report(path)
    assert text == found.report()
    page = ElementTree.fromstring(path.read_text().removeprefix("<!DOCTYPE html>\n"))
    titles = [one.text for one in page.iter("h1")]
    assert [title.partition(":")[0] for title in titles] == ["The towers of a model", "first", "second"]
    assert len([*page.iter("{http://www.w3.org/2000/svg}svg")]) >= 4
    assert text.splitlines()[0] == titles[1]


def test_encoders_that_answer_calls_of_other_forms_count_and_are_counted():
    model = nn.ModuleDict({"tower": nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()})
    tower = vg.wrap(model["tower"], [1, 2], backend="tape")
    found = vg.encoders(model)
    for shape, count in (((2, 8), 1), ((2, 3, 8), 2)):
        for _ in range(count):
            tower(torch.randn(shape))
    found = vg.encoders(model)
    page = found.prometheus()
    assert 'varlen_graphs_calls_total{encoder="tower"} 1' in page
    assert 'varlen_graphs_calls_total{encoder="tower#1"} 2' in page
    (main,) = found.values()
    assert found.bytes() == main.bytes() > main.others[0].bytes() > 0
    main.others[0].drop_budget(1)
    main.others[0].add_budget(1)
    found.capture().check()
    assert len(main.others[0].executor.store) == 2
