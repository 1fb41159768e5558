"""Examples may coincide: the doctor runs their rows with items of its own."""

import queue

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import Of


def by_the_first_length(m, x, lengths):
    return x * m.factors[len(lengths)]


def by_the_first_side(m, x, grid_thw):
    return x * m.factors[len(grid_thw)]


def by_the_first_boundary(m, x, cu_seqlens):
    return x * m.factors[int(cu_seqlens[1])]


LENGTHS = torch.tensor([3, 5])
EXAMPLES = {
    by_the_first_length: {"lengths": LENGTHS},
    by_the_first_side: {"grid_thw": torch.tensor([[2, 2, 1], [1, 1, 4]])},
    by_the_first_boundary: {"cu_seqlens": torch.tensor([0, 3, 8])},
}


@pytest.mark.parametrize("function", EXAMPLES)
def test_one_example_is_enough_where_the_items_can_be_changed(function):
    module = Of(function)
    module.factors = [*range(2, 12)]
    findings = vg.diagnose(module, {"x": torch.ones(8, 4)} | EXAMPLES[function])
    assert {finding.line.function for finding in findings} == {function.__name__}
    (name,) = EXAMPLES[function]
    assert any(f"in call 1 with {name} [" in finding.what or finding.kind == "host sync" for finding in findings)


def test_a_module_that_refuses_other_items_is_diagnosed_with_those_it_takes():
    def forward(m, x, lengths):
        assert lengths.tolist() == [3, 5]
        return x * 2

    kinds = [finding.kind for finding in vg.diagnose(Of(forward), {"x": torch.ones(8, 4), "lengths": LENGTHS})]
    assert kinds == ["host sync"]


def test_calls_whose_numbers_follow_from_the_items_are_left_as_they_are():
    def forward(m, x, lengths, max_seqlen):
        ran.put(lengths.shape)
        return x * lengths.sum()

    ran = queue.SimpleQueue()  # which no copy of the module has of its own
    assert vg.diagnose(Of(forward), {"x": torch.ones(8, 4), "lengths": LENGTHS, "max_seqlen": 5}).ok
    assert ran.qsize() == 3


class Images(nn.Module):
    """Adds positions to images of sizes of their own, as towers without padding do."""

    def __init__(self):
        super().__init__()
        self.table, self.proj = nn.Parameter(torch.ones(8, 8, 3)), nn.Linear(3, 4)

    def forward(self, images):
        parts = []
        for image in images:
            height, width = image.shape[-2:]
            parts.append(image.flatten(1).T + self.table[:height, :width].flatten(0, 1))
        return self.proj(torch.cat(parts))


@pytest.mark.parametrize("sizes", [[(8, 8)] * 3, [(8, 4), (8, 8)]])
def test_sizes_of_images_in_a_list_are_those_of_items(sizes):
    diagnosis = vg.diagnose(Images(), {"images": [torch.ones(3, *size) for size in sizes]})
    found = {(finding.kind, finding.line.source): finding for finding in diagnosis}
    value = found.pop(("frozen value", "parts.append(image.flatten(1).T + self.table[:height, :width].flatten(0, 1))"))
    assert found.keys() == {("frozen branch", "for image in images:")}
    assert "the shape of the argument images[" in value.what
    assert not diagnosis.notes


def cropped(m, pixel_values, image_sizes):
    parts = [image[:, :height, :width] for image, (height, width) in zip(pixel_values, image_sizes, strict=True)]
    return torch.cat([part.flatten(1).T for part in parts])


@pytest.mark.parametrize("form", [list, tuple, torch.tensor])
@pytest.mark.parametrize("sizes", [[(8, 8)] * 3, [(8, 4)] * 3, [(4, 4), (8, 8), (8, 4)]])
def test_sizes_beside_padded_images_are_changed_in_every_form(form, sizes):
    call = {"pixel_values": torch.ones(3, 3, 8, 8), "image_sizes": form(sizes)}
    (finding,) = vg.diagnose(Of(cropped), call)
    assert finding.line.source.startswith("parts = [image[:, :height, :width]")
    assert finding.kind == ("host sync" if form is torch.tensor else "frozen value")


def test_lists_of_lengths_and_positional_arguments_are_changed_too():
    def forward(m, x, lengths):
        return x.clamp(max=max(lengths))

    for lengths in ([4, 4], (4, 4), [3, 5]):
        (value,) = vg.diagnose(Of(forward), (torch.ones(8, 4), lengths))
        assert value.kind == "frozen value"
        assert "in call 1 with argument 1 [" in value.what


def test_entries_of_a_padded_batch_change_together():
    def forward(m, input_ids, attention_mask, counts):
        return input_ids + (attention_mask.sum() + counts[0]).item()

    runs = queue.SimpleQueue()  # which no copy of the module has of its own
    module = Of(lambda *args, **given: runs.put(given) or forward(*args, **given))
    ids, counts = torch.ones(2, 5, dtype=torch.long), torch.tensor([2, 5])
    vg.diagnose(module, {"input_ids": ids, "attention_mask": torch.arange(5) < counts[:, None], "counts": counts})
    seen = [runs.get() for _ in range(runs.qsize())]
    assert [given["counts"].tolist() for given in seen[::2]] == [[2, 5], [2, 5], [5, 2]]
    assert all(torch.equal(given["attention_mask"].sum(1), given["counts"]) for given in seen)
