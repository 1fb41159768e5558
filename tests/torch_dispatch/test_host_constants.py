"""`HostConstant`: host tensors that a forward makes and copies to the device: constants where they follow from sizes alone."""

import pytest
import torch

import varlen_graphs as vg
from tests.support.host_constants import CONSTANTS, KEPT, RANDOM, RESULTS, SPEC, VARYING, Towers, relative_positions
from tests.support.towers import equal_bits
from varlen_graphs.torch_dispatch.captured_inputs import CapturedInputs
from varlen_graphs.torch_dispatch.host_constants import ConstantsMode, HostConstant

pytestmark = pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")


def encoder_of(function, **options):
    return vg.GraphedEncoder(Towers(function).eval(), [16, 32], SPEC, backend="tape", **options)


@pytest.mark.parametrize("function", CONSTANTS)
def test_a_graph_holds_what_the_forward_makes_on_the_host(function):
    encoder = encoder_of(function)
    for rows in (5, 20, 16, 5):
        x = torch.randn(rows, 8)
        expected = encoder.module(x)
        for _ in range(2):
            assert equal_bits(encoder(x, lengths=[rows]), expected)
        encoder.poison()
    with torch.no_grad():
        encoder.module.table.mul_(2)  # weights may change
    assert equal_bits(encoder(x, lengths=[5]), encoder.module(x))
    assert not encoder.stats.eager


def test_constants_are_held_without_a_warning_and_are_no_memory_to_watch(recwarn):
    encoder = encoder_of(relative_positions)
    encoder(torch.randn(3, 8), lengths=[3])
    assert not [one for one in recwarn if "graphs read" in str(one.message) or "keeps" in str(one.message)]
    assert encoder.check() is None


@pytest.mark.parametrize("function", VARYING)
def test_values_that_differ_from_run_to_run_are_refused(function):
    with pytest.raises(vg.errors.CaptureError, match=rf"differs from that of the run before\n.*in {function.__name__}"):
        encoder_of(function)(torch.randn(3, 8), lengths=[3])


@pytest.mark.parametrize("function", RANDOM)
def test_random_numbers_of_the_host_are_refused(function):
    with pytest.raises(vg.errors.CaptureError, match=rf"host tensor(.|\n)*in {function.__name__}"):
        encoder_of(function)(torch.randn(3, 8), lengths=[3])


@pytest.mark.parametrize("function", RESULTS)
def test_reads_of_what_the_device_computes_of_constants_are_refused(function):
    with pytest.raises(
        vg.errors.CaptureError, match=rf"Tensor.tolist reads a tensor on the host(.|\n)*in {function.__name__}"
    ):
        encoder_of(function)(torch.randn(3, 8), lengths=[3])


def test_compiled_forwards_take_no_constants():
    encoder = encoder_of(relative_positions, capture=vg.options.Capture(compile=True))
    with pytest.raises(vg.errors.CaptureError, match=r"mixes device tensors with a host tensor"):
        encoder(torch.randn(3, 8), lengths=[3])


# On two devices: the host, and `meta` in place of a GPU


def on_meta(function):
    module = Towers(function)
    module.table = torch.nn.Parameter(module.table.to("meta"), requires_grad=False)
    x = torch.empty(6, 8, device="meta")
    return lambda: [module(x)]


@pytest.mark.parametrize("function", CONSTANTS)
def test_a_second_run_gets_the_constants_of_the_first(function):
    run, memory = on_meta(function), CapturedInputs(torch.device("meta"), "the module")
    memory.watch(run)
    assert memory.constants
    ConstantsMode(torch.device("meta"), "the module", memory.constants).watch(run, fast_paths=False)
    one = memory.constants[0]
    other = [HostConstant(one.on_host + 1, one.on_device), *memory.constants[1:]]
    with pytest.raises(vg.errors.CaptureError, match="differs from that of the run before"):
        ConstantsMode(torch.device("meta"), "the module", other).watch(run, fast_paths=False)


@pytest.mark.parametrize("function", [*KEPT, *RANDOM])
def test_what_may_change_on_the_host_is_refused(function):
    memory = CapturedInputs(torch.device("meta"), "the module")
    with pytest.raises(vg.errors.CaptureError, match=rf"host tensor(.|\n)*in {function.__name__}"):
        memory.watch(on_meta(function))
    assert not memory.constants
