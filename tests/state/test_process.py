"""A process is left as it was: functions, classes, hooks and flags that are not this library's, whatever it did."""

from functools import cache
from importlib.util import find_spec

import pytest

from tests.support.scripts import run_script

SNAPSHOT = """
    import builtins, contextlib, gc, importlib, os, signal, sys, threading, types, warnings

    import numpy
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    with contextlib.suppress(ImportError):
        import triton
        import triton.language

    class Module(nn.Module):
        scale = 1.0

        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x):
            global longest
            longest = max(longest, len(x))
            return helper(self.lin(x)) * self.scale

    longest = 0

    def helper(x):
        return torch.relu(x)

    NAMES = [
        "builtins", "gc", "sys", "threading", "types", "warnings", "numpy", "copyreg", "inspect", "linecache", "pickle",
        "weakref", "torch", "torch.nn", "torch.nn.functional", "torch.nn.modules.module", "torch.nn.parameter",
        "torch.overrides", "torch.random", "torch.cuda", "torch.cuda.graphs", "torch.storage", "torch._tensor", "torch._C",
        "torch._C._nn", "torch.autograd", "torch.jit", "torch.utils._python_dispatch", "torch.serialization",
        "torch.library", "torch._ops", "triton", "triton.language", "triton.runtime.jit", "triton.runtime.interpreter",
        "triton.compiler", "triton.runtime.autotuner", "__main__",
    ]

    def classes():
        found = [nn.Module, nn.Linear, nn.Parameter, torch.Tensor, torch._C.TensorBase, torch.UntypedStorage]
        found += [torch.TypedStorage, torch.Generator, torch.Size, torch.device, torch.dtype, torch.cuda.CUDAGraph, Module]
        found += [torch.cuda.Stream, torch.cuda.Event, torch._ops.OpOverload, torch._ops.OpOverloadPacket, nn.BatchNorm1d]
        found += [torch.autograd.Function, torch.utils._python_dispatch.TorchDispatchMode, threading.Thread]
        found += [torch.overrides.TorchFunctionMode, torch.nn.ModuleList, nn.modules.batchnorm._NormBase]
        for name in ("triton.runtime.jit", "triton.runtime.interpreter", "triton.runtime.autotuner"):
            own = vars(sys.modules[name]).values() if name in sys.modules else ()
            found += [one for one in own if isinstance(one, type) and one.__module__ == name]
        return found

    def state():
        # Submodules that are imported later are no change, so modules are compared by what they had at first.
        held = {name: dict(vars(sys.modules[name])) for name in NAMES if name in sys.modules}
        held |= {f"class {one.__module__}.{one.__qualname__}": dict(vars(one)) for one in classes()}
        registry = vars(torch.nn.modules.module)
        held["hooks of all modules"] = {name: dict(one) for name, one in registry.items() if name.startswith("_global_") and isinstance(one, dict)}
        held["process"] = {
            "trace": sys.gettrace(), "profile": sys.getprofile(), "trace of threads": threading.gettrace(),
            "profile of threads": threading.getprofile(), "collector": (gc.isenabled(), gc.get_threshold()),
            "callbacks of the collector": list(gc.callbacks), "frozen": gc.get_freeze_count(), "debug": gc.get_debug(),
            "excepthook": sys.excepthook, "unraisablehook": sys.unraisablehook, "displayhook": sys.displayhook,
            "hook of threads": threading.excepthook, "meta_path": list(sys.meta_path), "path": list(sys.path),
            "path_hooks": list(sys.path_hooks), "recursion": sys.getrecursionlimit(), "switch": sys.getswitchinterval(),
            "signals": {one: signal.getsignal(one) for one in signal.valid_signals()}, "environment": dict(os.environ),
            "showwarning": warnings.showwarning, "filters": list(warnings.filters), "stdout": sys.stdout, "stderr": sys.stderr,
            "asyncgen": tuple(sys.get_asyncgen_hooks()), "origin": sys.get_coroutine_origin_tracking_depth(),
            "threads": {one.name for one in threading.enumerate() if not one.daemon},
        }
        backends = torch.backends
        held["torch's flags"] = {
            "dtype": torch.get_default_dtype(), "device": torch.get_default_device(), "grad": torch.is_grad_enabled(),
            "inference": torch.is_inference_mode_enabled(), "threads": torch.get_num_threads(),
            "deterministic": torch.are_deterministic_algorithms_enabled(), "fill": torch.utils.deterministic.fill_uninitialized_memory,
            "debug": torch.get_deterministic_debug_mode(), "precision": torch.get_float32_matmul_precision(),
            "anomaly": torch.is_anomaly_enabled(), "warn": torch.is_warn_always_enabled(),
            "autocast": [torch.is_autocast_enabled(one) for one in ("cpu", "cuda")], "autocast dtype": torch.get_autocast_dtype("cpu"),
            "cache": torch.is_autocast_cache_enabled(), "tf32": (backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32),
            "cudnn": (backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic),
            "reduced": backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
            "sdp": (backends.cuda.flash_sdp_enabled(), backends.cuda.mem_efficient_sdp_enabled(), backends.cuda.math_sdp_enabled()),
            "mkldnn": torch.backends.mkldnn.enabled, "modes": torch._C._len_torch_dispatch_stack(),
            "function modes": torch._C._len_torch_function_stack(),
            "printing": str(torch._tensor_str.PRINT_OPTS), "future": torch.__future__.get_swap_module_params_on_conversion(),
            "overwrite": torch.__future__.get_overwrite_module_params_on_conversion(), "sharing": torch.multiprocessing.get_sharing_strategy(),
            "numpy": str(numpy.geterr()),
        }
        return held

    def differences(before, after):
        for place, own in before.items():
            now = after[place]
            for name in own:
                if name in ALLOWED or place == "__main__" and name in ("longest", "BEFORE"):
                    continue
                if name not in now:
                    yield f"{place}: {name} is gone"
                elif now[name] is not own[name] and not (type(own[name]) in PLAIN and now[name] == own[name]):
                    yield f"{place}: {name} is {now[name]!r:.80}, not {own[name]!r:.80}"
            if place.startswith("class ") or place == "hooks of all modules":
                yield from (f"{place}: {name} is new" for name in now.keys() - own.keys())

    PLAIN = (bool, int, float, str, bytes, tuple, list, dict, set, torch.dtype, torch.device, type(None))
    ALLOWED = {"__annotations__", "__doc__", "__dict__", "__weakref__", "__warningregistry__", "last_value"}

    def tell(when):
        for line in differences(BEFORE, state()):
            print(f"{when}: {line}".replace(" ", "_"), flush=True)
        print(f"{when}:_looked".replace(" ", "_"), flush=True)

    BEFORE = state()
"""
"""Begins a script: `tell(when)` prints what is not as it was before this library was imported."""

WRAPPED = """
    import transformers
    from transformers import BertConfig, BertModel
    from transformers.models.bert import modeling_bert

    NAMES += ["transformers", "transformers.models.bert.modeling_bert", "transformers.modeling_utils", "transformers.masking_utils"]
    models = {one: dict(vars(one)) for one in vars(modeling_bert).values() if isinstance(one, type) and one.__module__ == modeling_bert.__name__}
    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    model = BertModel(config).eval()
    ids, mask = torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    expected = model(ids, mask)
    BEFORE = state()
    kept = {name: dict(vars(part)) for name, part in model.named_modules()}

    import varlen_graphs as vg
    tell("import beside transformers")
    vg.wrap(model, backend="tape")
    model(ids, mask), model(ids[:1], mask[:1])
    tell("calls of a wrapped model")
    vg.unwrap(model)
    tell("unwrap")
    for one, own in models.items():
        for name in own:
            if vars(one).get(name) is not own[name]:
                print(f"unwrap:_class_{one.__name__}:_{name}")
    assert kept.keys() == dict(model.named_modules()).keys()
    for name, part in model.named_modules():
        if vars(part).keys() != kept[name].keys():
            print(f"unwrap:_part_{name}:_{vars(part).keys()-kept[name].keys()}".replace(" ", "_"))
    assert torch.equal(model(ids, mask).last_hidden_state, expected.last_hidden_state)
"""

ENCODERS = """
    import varlen_graphs as vg
    tell("import")

    def encoder_of(module, **options):
        spec = vg.BufferSpec(vg.inputs.Rows("x", shape=(8,)), vg.Lengths())
        return vg.GraphedEncoder(module, [64, 256], spec, backend="tape", **options)

    encoder = encoder_of(Module().eval())
    tell("encoder")
    encoder.capture()
    tell("capture")
    encoder(torch.ones(5, 8), lengths=[2, 3])
    tell("call")
    other = encoder_of(Module().eval())
    other(torch.ones(9, 8), lengths=[9])
    tell("first")
    other.verify([{"x": torch.ones(9, 8), "lengths": [9]}])
    tell("verify")
    vg.diagnose(Module().eval(), torch.ones(9, 8), torch.ones(5, 8))
    tell("diagnosis")
    encoder.release()
    del encoder, other
    gc.collect()
    tell("release")

    class Reads(Module):
        def forward(self, x):
            return super().forward(x) * x.max().item()

    class Fails(Module):
        def forward(self, x):
            raise RuntimeError("no")

    class Mixes(Module):
        def forward(self, x):
            return super().forward(x) - x.mean()

    for kind in (Reads, Fails, Mixes):
        encoder = encoder_of(kind().eval())
        for make in (encoder.capture, lambda: encoder(torch.ones(5, 8), lengths=[2, 3])):
            with contextlib.suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                make()
        tell(kind.__name__)
"""


@cache
def printed():
    """Run everything in one process, the wrapped model first, where there is transformers, and return what it told."""
    words, _ = run_script(*[WRAPPED] * bool(find_spec("transformers")), ENCODERS, prelude=SNAPSHOT)
    return words


WRAPPED_MOMENTS = ["import beside transformers", "calls of a wrapped model", "unwrap"]


@pytest.mark.parametrize(
    "moments",
    [
        pytest.param(
            ["import", "encoder", "capture", "call", "first", "verify", "diagnosis", "release"], id="captures"
        ),
        pytest.param(["Reads", "Fails", "Mixes"], id="what cannot be captured"),
        pytest.param(WRAPPED_MOMENTS, id="a wrapped model"),
    ],
)
def test_the_process_is_left_as_it_was(moments):
    if moments is WRAPPED_MOMENTS:
        pytest.importorskip("transformers")
    told = [line for line in printed() if line.partition(":")[0].replace("_", " ") in moments]
    assert [line for line in told if line.endswith(":_looked")] == [
        f"{one}:_looked".replace(" ", "_") for one in moments
    ]
    assert len(told) == len(moments), "\n".join(told)
