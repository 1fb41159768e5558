"""The public face of the package: what importing it loads, that all of it is documented, and what may be copied."""

import copy
import pickle
import pkgutil
import subprocess
import sys
from types import ModuleType

import pytest
import torch

import varlen_graphs as vg
from tests.support.encoders import attention_encoder, attention_spec, rows_for


def test_everything_public_is_documented():
    members = {name: getattr(vg, name) for name in vg.__all__}
    for package in [member for member in members.values() if isinstance(member, ModuleType)]:
        members |= {f"{package.__name__}.{name}": getattr(package, name) for name in getattr(package, "__all__", ())}
    for name, member in members.items():
        assert member.__doc__, name
        for attribute, method in vars(member).items() if isinstance(member, type) else ():
            if callable(method) and not attribute.startswith("_"):
                assert method.__doc__, f"{name}.{attribute}"


@pytest.fixture(scope="module")
def imported():
    """What importing the package adds to the modules of torch and einops."""
    code = "import sys, torch, einops; before = {*sys.modules}; import varlen_graphs; print(*{*sys.modules} - before)"
    return {*subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()}


def test_importing_the_package_imports_neither_triton_nor_transformers(imported):
    """Torch itself may import triton: what counts is that this package adds nothing."""
    packages = {name.partition(".")[0] for name in imported}
    assert "varlen_graphs" in packages
    assert not packages & {"triton", "transformers", "skimage", "PIL", "tqdm"}


def test_importing_the_package_imports_all_files_of_recipes(imported):
    """So that all of them are registered."""
    files = {name for _, name, _ in pkgutil.walk_packages(vg.recipes.__path__, "varlen_graphs.recipes.")}
    assert len(files) > 20
    assert files <= imported


def test_the_errors_have_one_base():
    errors = [getattr(vg.errors, name) for name in vg.errors.__all__]
    assert len(errors) == 10
    assert all(issubclass(error, vg.errors.VarlenGraphsError) for error in errors)


def sent(value):
    """What another process gets."""
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("send", [sent, copy.deepcopy, copy.copy])
def test_what_an_encoder_tells_may_be_sent_to_another_process_and_copied(send):
    spec = attention_spec(rows=vg.inputs.Rows("x", shape=(8,)))
    encoder = attention_encoder(spec=spec)
    call = {"x": rows_for([6]), "lengths": [6]}
    with encoder.record() as trace:
        encoder(**call)
        stats, recorded = send(encoder.stats), send(trace)
        assert stats == encoder.stats
        assert stats.prometheus() == encoder.stats.prometheus()
        encoder(**call)
    assert (stats.calls, len(recorded), len(send(trace))) == (1, 1, 2)  # as they were, whatever comes later
    stats.count_call(1)
    recorded.count(next(iter(recorded.calls)))
    for value in (encoder.verify([call]), encoder.budgets, encoder.disabled, encoder.report(), spec.layout):
        assert send(value) == value
    assert attention_encoder(spec=send(spec))(**call).shape == (6, 8)
    assert send(encoder.costs).as_json() == encoder.costs.as_json()
    assert vg.traffic.plan(send(trace), max_graphs=1) == send(vg.traffic.plan(trace, max_graphs=1))
    assert send(vg.diagnose(torch.nn.Linear(2, 2), {"input": torch.ones(2, 2)})).ok is not None


@pytest.mark.parametrize("send", [pickle.dumps, copy.deepcopy, copy.copy])
def test_what_belongs_to_a_process_says_so_when_it_is_copied(send):
    encoder = attention_encoder()
    for value in (encoder, encoder.pool):
        with pytest.raises(TypeError, match=r"is neither copied nor pickled, because its .* to this process: "):
            send(value)
