"""`GraphedEncoder` in training: calls that need gradients run the original with them, and all others replay."""

import copy
import warnings

import pytest
import torch
from torch import nn

import varlen_graphs as vg
from tests.support.encoders import BUDGETS, rows_for
from tests.support.towers import distance, pixels, qwen3_vl_tower
from tests.support.whole_models import prompt, whole_model
from varlen_graphs.capture.mode import ROWS_NEED_GRAD, TRAINING

GRID = [(1, 4, 6), (1, 2, 4)]

SHALLOW = {"depth": 2, "deepstack_visual_indexes": [0]}

IMAGES = [(1, 8, 8), (1, 4, 6)]

LENGTHS = [20, 7]


class Positioned(nn.Linear):
    """A module of rows and of a declared buffer that calls do not bring."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(8, 8)

    def forward(self, x, position_ids):
        return super().forward(x) * (1 + position_ids[:, None])


def positioned_encoder(module=None, rows="x", **options):
    spec = vg.BufferSpec(rows, vg.Lengths(), [vg.buffers.RowPositions()])
    return vg.GraphedEncoder(module or Positioned(), BUDGETS, spec, **{"backend": "tape"} | options)


def positions(lengths):
    return torch.cat([torch.arange(length) for length in lengths])


def gradients(module, loss):
    """Return the gradients of a loss by the names of parameters, those without one left out."""
    module.zero_grad()
    loss.backward()
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return found


def tensors(output):
    return [part for value in output.values() for part in (value if isinstance(value, list | tuple) else [value])]


def loss_of(output):
    return sum(part.float().square().mean() for part in tensors(output))


@pytest.fixture(autouse=True)
def grad_mode(inference):
    with torch.enable_grad():
        yield


def test_a_recipe_trains_the_original_tower():
    tower = qwen3_vl_tower(**SHALLOW).train()
    expected = gradients(tower, loss_of(tower(pixels(GRID), grid_thw=torch.tensor(GRID))))
    encoder = vg.recipes.qwen3_vl(tower.eval(), [vg.budgets.Budget(128, items=4, segments=4)], backend="tape")
    for layout in (GRID, torch.tensor(GRID)):
        encoder.train()
        found = gradients(tower, loss_of(encoder(pixels(GRID), grid_thw=layout)))
        assert found.keys() == expected.keys() == dict(tower.named_parameters()).keys()
        assert all(distance(found[name], expected[name]) < 1e-5 for name in expected)
        with torch.no_grad():
            encoder.eval()(pixels(GRID), grid_thw=layout)
    assert encoder.stats.eager == {TRAINING: 2}
    assert encoder.stats.replays.total() == 2


def test_what_was_learned_is_replayed():
    tower = qwen3_vl_tower(**SHALLOW)
    encoder = vg.recipes.qwen3_vl(tower, [vg.budgets.Budget(128, items=4, segments=4)], backend="tape")
    with torch.no_grad():
        before = encoder(pixels(GRID), grid_thw=GRID).last_hidden_state
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
    encoder.train()
    loss_of(encoder(pixels(GRID), grid_thw=GRID)).backward()
    optimizer.step()
    encoder.eval()
    with torch.no_grad():
        after = encoder(pixels(GRID), grid_thw=GRID)
        assert distance(after, tower(pixels(GRID), grid_thw=torch.tensor(GRID))) < 1e-5
    assert not torch.allclose(before, after.last_hidden_state)
    assert encoder.stats.replays.total() == 2


def test_a_module_with_declared_buffers_is_trained_over_the_items_themselves():
    module, rows = Positioned().train(), rows_for(LENGTHS)
    expected = gradients(module, module(rows, positions(LENGTHS)).square().sum())
    encoder = positioned_encoder(module)
    output = encoder(rows, lengths=LENGTHS)
    assert torch.equal(output, module(rows, positions(LENGTHS)))
    found = gradients(module, output.square().sum())
    assert all(torch.allclose(found[name], expected[name]) for name in ("weight", "bias"))
    assert encoder.stats.eager == {TRAINING: 1}


def test_a_stage_is_trained_too():
    encoder = positioned_encoder(Positioned().train(), vg.inputs.Rows("x", (8,)))
    with encoder.stage(LENGTHS) as stage:
        stage.rows.copy_(rows_for(LENGTHS))
    found = gradients(encoder.module, stage.output.sum())
    expected = gradients(encoder.module, encoder.module(rows_for(LENGTHS), positions(LENGTHS)).sum())
    assert torch.allclose(found["weight"], expected["weight"])


def test_rows_that_require_grad_get_it_in_evaluation_mode():
    encoder, other = positioned_encoder(Positioned().eval().requires_grad_(False)), rows_for(LENGTHS, seed=1)
    rows = rows_for(LENGTHS).requires_grad_()
    (encoder(rows, lengths=LENGTHS) * other).sum().backward()
    found, rows.grad = rows.grad, None
    (encoder.module(rows, positions(LENGTHS)) * other).sum().backward()
    assert torch.allclose(found, rows.grad)
    assert not encoder(rows_for(LENGTHS), lengths=LENGTHS).requires_grad
    with torch.no_grad():
        assert not encoder(rows, lengths=LENGTHS).requires_grad
    assert encoder.stats.eager == {ROWS_NEED_GRAD: 1}
    assert encoder.stats.replays.total() == 2


def test_a_batch_to_pack_keeps_its_gradients():
    class Plain(nn.Linear):
        pass

    torch.manual_seed(0)
    spec = vg.BufferSpec(vg.inputs.Rows("input", padded_by="mask"), vg.Lengths())
    encoder = vg.GraphedEncoder(Plain(8, 8).train(), BUDGETS, spec, backend="tape")
    batch, mask = torch.randn(2, 5, 8, requires_grad=True), torch.tensor([[1] * 5, [1, 1, 0, 0, 0]])
    output = encoder(batch, lengths=[5, 2], mask=mask)
    expected = encoder.module(batch) * mask[..., None]
    assert torch.allclose(output, expected)
    inputs = [batch, encoder.module.weight]
    found, right = (torch.autograd.grad(one.square().sum(), inputs) for one in (output, expected))
    assert all(distance(a, b) < 1e-5 for a, b in zip(found, right, strict=True))


def test_parameters_may_be_frozen_and_freed_at_any_time():
    encoder = positioned_encoder(Positioned().requires_grad_(False).train())
    with pytest.warns(UserWarning, match="captured in training mode; call module.eval"):
        encoder(rows_for(LENGTHS), lengths=LENGTHS)
    assert encoder.stats.replays.total() == 1
    for trained in (True, False, True):
        encoder.module.bias.requires_grad_(trained)
        assert encoder(rows_for(LENGTHS), lengths=LENGTHS).requires_grad is trained
    assert encoder.stats.eager == {TRAINING: 2}
    assert encoder.stats.replays.total() == 2


def test_without_grad_mode_nothing_is_trained():
    encoder = positioned_encoder(Positioned().eval())
    encoder.train()
    with torch.no_grad():
        assert not encoder(rows_for(LENGTHS), lengths=LENGTHS).requires_grad
    with torch.inference_mode():
        encoder(rows_for(LENGTHS), lengths=LENGTHS)
    assert encoder.stats.eager == {"training mode differs from construction": 2}


def test_that_outputs_carry_no_grad_is_said_once_an_encoder():
    for _ in range(2):
        encoder = positioned_encoder(Positioned().eval())
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")
            encoder(rows_for(LENGTHS), lengths=LENGTHS)
        with pytest.warns(UserWarning, match="Positioned has parameters that require grad and grad mode is on") as said:
            outputs = [encoder(rows_for(LENGTHS), lengths=LENGTHS) for _ in range(3)]
        assert not any(output.requires_grad for output in outputs)
        assert len(said) == 1
        assert encoder.stats.replays.total() == 4
    frozen = positioned_encoder(Positioned().eval().requires_grad_(False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        frozen(rows_for(LENGTHS), lengths=LENGTHS)


def test_a_capture_in_training_mode_is_warned_of():
    encoder = positioned_encoder(Positioned().train(), vg.inputs.Rows("x", (8,)))
    with pytest.warns(UserWarning, match="Positioned is captured in training mode; call module.eval"):
        encoder.capture()


def test_a_wrapped_model_is_trained_as_without_graphs():
    plain = whole_model().train()
    inputs = prompt(plain, IMAGES)
    expected = gradients(plain, plain(**inputs).logits.float().square().mean())
    model = vg.wrap(copy.deepcopy(plain).eval(), [vg.budgets.Budget(512, items=8)], backend="tape")
    with torch.no_grad():
        model(**inputs)
    model.train()
    found = gradients(model, model(**inputs).logits.float().square().mean())
    assert found.keys() == expected.keys()
    assert sum(name.startswith("model.visual") for name in found) > 10
    assert all(distance(found[name], expected[name]) < 1e-4 for name in expected)
    (encoder,) = vg.encoders(model).values()
    assert encoder.stats.eager == {TRAINING: 1}
    model.eval()
    with torch.no_grad():
        model(**inputs)
    assert encoder.stats.replays.total() == 2
