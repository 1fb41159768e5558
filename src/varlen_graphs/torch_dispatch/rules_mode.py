"""Dispatch mode that checks a run against the rules of CUDA graph capture, and names the line that violates one."""

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from varlen_graphs.errors import CaptureError
from varlen_graphs.torch_dispatch.host_tensors import HostTensors
from varlen_graphs.torch_dispatch.leaves import leaves_of, tensors_in
from varlen_graphs.torch_dispatch.lines import UNKNOWN_LINE, names_cpu, user_lines
from varlen_graphs.torch_dispatch.rules import (
    EXPLANATIONS,
    MASK_REMEDY,
    Violation,
    checks_on_cpu,
    creates_on_host,
    function_violation,
    has_storage,
    operator_violation,
    reads_host,
    transfer_violation,
)
from varlen_graphs.torch_dispatch.sharded import local_tensor
from varlen_graphs.torch_dispatch.thread_modes import RunMode, run_under, unwatched
from varlen_graphs.torch_dispatch.uploads import MOVES, copied_tensors, copied_to_device, lists_to_tensors, makes_empty

aten = torch.ops.aten

Result = TypeVar("Result")

_FAST_PATHS = {
    module.forward.__code__ for module in (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
}
"""Forwards of torch that take another path under a function mode."""

MASKS_OF_TRANSFORMERS = str(Path("transformers", "masking_utils.py"))
"""File whose functions make attention masks from key padding masks."""

_DEVICE = Tensor.device.__get__  # type: ignore[attr-defined]


class CaptureRulesMode(RunMode):
    """Dispatch mode that refuses every operation that cannot be part of a CUDA graph.

    If the device is a GPU, host tensors are those on the CPU. If it is the CPU (the tape), they are identified by how
    they were created: a factory without `device=`, `torch.tensor` and `from_numpy` create host tensors.

    A host tensor that is a constant (see `HostTensors`) may be copied to the device: the run gets a copy made before.

    Subclasses override the `on_...` methods.
    """

    takes_constants = True

    def __init__(self, device: torch.device, name: str) -> None:
        super().__init__()
        self.dispatch_depth = 0  # of operators that are being executed
        self.thread_id = threading.get_ident()
        self.device = device
        self.made_on_host: dict[int, Tensor] = {}  # by storage; held, so that the keys stay unique
        self.has_fast_path = False
        self.on_fast_path = False
        self.checks_on_cpu = False
        self._made = HostTensors()
        self._devices: dict[int, tuple[torch.device, bool]] = {}  # those read from tensors, and whether of the host
        self._name = name
        self._refusal: str | None = None

    def watch(self, run: Callable[[], Result], fast_paths: bool = True) -> Result:
        """Call a function in this thread, checked, without gradients and with code under `torch.compile` uncompiled.

        Modules of torch that avoid their fast path under a function mode run once more, without it: what counts is
        what runs without being watched. `fast_paths=False` runs everything once.

        Raises:
            CaptureError: The function did something that cannot be part of a graph, even if it handled the error.
        """
        self.thread_id, self._refusal, self.dispatch_depth = threading.get_ident(), None, 0
        self.has_fast_path = self.on_fast_path = False
        self.begin()
        try:
            result = run_under(run, self, _FunctionMode(self))
            if fast_paths and self.has_fast_path and self._refusal is None:
                self.on_fast_path = True
                self.begin()
                result = run_under(run, self)
        except Exception as error:
            if self._refusal is None or self._refusal == str(error):
                raise
            raise CaptureError(self._refusal) from error
        finally:
            self._made.clear()
        if self._refusal is not None:
            raise CaptureError(self._refusal)
        return result

    def begin(self) -> None:
        """Prepare for a run."""
        self._made.clear()

    def on_operator(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Tensor], results: list[Any]
    ) -> None:
        """Handle an operator on the device that has run. Does nothing by default."""

    def on_violation(self, violation: Violation) -> None:
        """Handle a violation. By default, raise an error that names the line of user code."""
        why, remedy = EXPLANATIONS[violation.kind]
        line = next(user_lines(), UNKNOWN_LINE)
        if line.file.endswith(MASKS_OF_TRANSFORMERS):
            remedy = MASK_REMEDY
        refusal = (
            f"{self._name} could not be captured: {violation.what}\n  at {line}\n{why} {remedy}\n"
            "vg.diagnose(module, call) lists everything that prevents a capture."
        )
        self._refusal = self._refusal or refusal
        raise CaptureError(refusal)

    def on_function_violation(
        self, violation: Violation, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Handle a torch function that violates a rule, and return its result. Raises by default."""
        self.on_violation(violation)

    def call_function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """Call a torch function that violates no rule. Without tensor arguments it may create host tensors."""
        if reads_host(func) and self.is_host(tensors[0]):
            self._made.read(tensors[0])
        result = func(*args, **kwargs)
        if creates_on_host(func, tensors, kwargs, self.names_host):
            for made in leaves_of(result):
                if isinstance(made, Tensor):
                    self.mark_host(made)
                    self._made.add(made, tensors)
        elif makes_empty(func, args, kwargs):
            self.made_on_host.pop(result.untyped_storage()._cdata, None)
        return result

    def mark_host(self, tensor: Tensor) -> None:
        """Mark a CPU tensor as one that would stay on the host if the module were on a GPU."""
        tensor = local_tensor(tensor)
        if has_storage(tensor):
            self.made_on_host[tensor.untyped_storage()._cdata] = tensor.detach()

    def make_constant(self, host: Tensor) -> Tensor:
        """Return a copy on the device of a host tensor that may be a constant."""
        with unwatched():
            return host.to(self.device, copy=True)

    def copy_constant(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Return the result of a copy to the device, made of a constant; `None` if the tensor may not be one."""
        if not (self.takes_constants and self._made.are_constants(copied_tensors(func, args, kwargs))):
            return None
        moves = func in MOVES
        host = args[0] if moves else func(*args, **kwargs | {"device": "cpu"})
        self.mark_host(host)
        constant = self.make_constant(host).clone()
        self._made.add_copy(host, constant)
        return func(constant, *args[1:], **kwargs) if moves else constant

    def of_constants(self, violation: Violation, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a function that violates a rule, made of constants; `None` if it takes others."""
        if violation.kind == "copy to device":
            return self.copy_constant(func, args, kwargs)
        on_host = self._made.copy_on_host(args[0]) if violation.kind in ("host sync", "branch") else None
        with unwatched():
            return None if on_host is None else func(on_host, *args[1:], **kwargs)

    def is_host(self, tensor: Tensor) -> bool:
        """Return True if a tensor is on the host, or would be if the module were on a GPU."""
        if self.device.type != "cpu":
            return tensor.device.type == "cpu"
        if not self.made_on_host or not has_storage(tensor):
            return False
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # has no storage; wraps tensors seen before
            return False
        return local_tensor(tensor).untyped_storage()._cdata in self.made_on_host

    def names_host(self, target: torch.device | str | Tensor) -> bool:
        """Return True if a device, the name of one, or the device of a tensor is the host.

        On the CPU, the device of a host tensor equals that of the module, but it is another object. An unknown one may
        be the module's, unless the function that passes it names `"cpu"`, and no other device.
        """
        if isinstance(target, Tensor):
            return self.is_host(target)
        if isinstance(target, str):
            return target.partition(":")[0] == "cpu"
        if self.device.type != "cpu" or target.type != "cpu":
            return target.type == "cpu"
        _, of_host = self._devices.get(id(target), (target, None))
        return names_cpu() if of_host is None else of_host

    def note_device(self, tensor: Tensor, device: torch.device) -> None:
        """Remember whose device this is."""
        self._devices[id(device)] = device, self.is_host(tensor)

    def run_operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and return its result."""
        args = self._with_constants(func, args, kwargs)
        inputs = tensors_in(args, kwargs)
        on_host = [tensor for tensor in inputs if self.is_host(tensor)]
        all_on_host = bool(inputs) and len(on_host) == len(inputs)
        violation = transfer_violation(func, args, kwargs)
        if violation is None and not all_on_host:
            violation = operator_violation(func, args, kwargs, on_host, self.is_host)
        if violation is None and any(one in self._made for one in copied_to_device(func, args, kwargs, self.is_host)):
            violation = Violation("copy to device", "it uploads host memory that the run itself created")
        if violation is not None and self._counts():
            self.on_violation(violation)
        self.dispatch_depth += 1
        try:
            result = func(*args, **kwargs)
        finally:
            self.dispatch_depth -= 1
        results = [local_tensor(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves_of(result)]
        tensors = [one for one in results if isinstance(one, Tensor)]
        uploads = all_on_host and self.device.type != "cpu" and not all(map(self.is_host, tensors))
        if func is aten.lift_fresh.default or (not uploads and (all_on_host or not inputs)):
            self._made.add_results(func, args, kwargs, inputs, tensors)
        if self.device.type == "cpu" and (all_on_host or func is aten.lift_fresh.default):
            for tensor in tensors:
                self.mark_host(tensor)
        elif not all(has_storage(tensor) for tensor in (*inputs, *tensors)):
            if self._counts():
                what = f"{func} takes or makes a tensor that is sparse or nested"
                self.on_violation(Violation("sparse tensor", what))
        elif uploads or not all_on_host:
            self.on_operator(func, args, kwargs, inputs, results)
        return result

    def _with_constants(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return the arguments of an operator, with constants in place of host tensors that it copies to the device."""
        if self.on_fast_path or not self.takes_constants:
            return args
        copied = copied_to_device(func, args, kwargs, self.is_host)
        constants = {id(one): self.make_constant(one) for one in copied if self._made.are_constants([one])}
        if constants:
            args = tree_map_only(Tensor, lambda one: constants.get(id(one), one), args)
        return args

    def _counts(self) -> bool:
        """Return False in checks of values on the CPU, and in code that ran before under the function mode."""
        if self.checks_on_cpu:
            return False
        frame = sys._getframe(2) if self.on_fast_path else None
        while frame is not None and frame.f_code not in _FAST_PATHS:
            frame = frame.f_back
        return frame is not None or not self.on_fast_path


class _FunctionMode(TorchFunctionMode):
    """Checks torch functions that never reach dispatch on the CPU: reads by the host, and tensor creation."""

    def __init__(self, rules: CaptureRulesMode) -> None:
        super().__init__()
        self._rules = rules

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, rules = kwargs or {}, self._rules
        if rules.dispatch_depth:
            return func(*args, **kwargs)
        if func in (Tensor.__getitem__, Tensor.__setitem__) and rules.takes_constants:
            args = (args[0], lists_to_tensors(args[1]), *args[2:])
        if sys._getframe(1).f_code in _FAST_PATHS:
            rules.has_fast_path = True
        tensors = tensors_in(args, kwargs)
        if func == _DEVICE and rules.device.type == "cpu":
            device = func(*args, **kwargs)
            rules.note_device(args[0], device)
            return device
        violation = function_violation(func, args, kwargs, tensors, rules.is_host, rules.names_host)
        if violation is not None:
            constant = rules.of_constants(violation, func, args, kwargs)
            return rules.on_function_violation(violation, func, args, kwargs) if constant is None else constant
        if rules.device.type != "cpu" or not checks_on_cpu(func, args, kwargs):
            return rules.call_function(func, args, kwargs, tensors)
        rules.checks_on_cpu = True
        try:
            return rules.call_function(func, args, kwargs, tensors)
        finally:
            rules.checks_on_cpu = False
