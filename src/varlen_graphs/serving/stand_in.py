"""A module that stands in for another one inside a model."""

import inspect
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from varlen_graphs.errors import SpecError
from varlen_graphs.watch.owners import REGISTERED


def _of_module(name: str) -> Any:
    """Return a property for an attribute of the module; `nn.Module.__init__`, which sets it, changes nothing."""
    return property(lambda self: getattr(self.module, name), lambda self, value: None)


class StandIn(nn.Module):
    """A module with the submodules, parameters, buffers and attributes of another one.

    Assigned in the place of that module, `model.visual = stand_in`, it leaves the names in the model's state dict as
    they were. Assigned beside it, it adds nothing there. It holds no weights of its own.

    Args:
        module: The module to stand in for.

    Attributes:
        module: As given.
    """

    module: nn.Module

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module  # not registered: its parts are found through the properties below

    @property
    def training(self) -> bool:
        """Mode of the module."""
        return self.module.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "module" in vars(self):  # nn.Module sets it before
            self.module.training = mode

    _parameters: Any = _of_module("_parameters")
    _buffers: Any = _of_module("_buffers")
    _non_persistent_buffers_set: Any = _of_module("_non_persistent_buffers_set")

    @property
    def _modules(self) -> Any:
        modules = self.module._modules
        if any(part is self for part in modules.values()):
            raise SpecError(
                f"an encoder of {type(self.module).__name__} was assigned as an attribute of that module itself, which "
                "registers it as a part: to put it in the place of the forward, assign encoder.forward"
            )
        return modules

    @_modules.setter
    def _modules(self, value: Any) -> None:
        pass

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a part or a weight of the module there; any other attribute on the stand-in, which registers nothing.

        Raises:
            AttributeError: Another module; make an encoder of that one.
        """
        module = vars(self).get("module")
        if module is not None and name == "module" and value is not module:
            raise AttributeError(
                f"the module of an encoder cannot be set, because its graphs are those of its {type(module).__name__}: "
                "make an encoder of the other module"
            )
        of_module = module is not None and name not in vars(self) and isinstance(value, nn.Module | Tensor | None)
        if of_module and any(name in vars(module)[registry] for registry in REGISTERED):
            setattr(module, name, value)
        else:
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module."""
        if name == "module" or name.startswith("__"):  # not set yet, or a protocol that the module has for itself
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.module, name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's state dict; add nothing to that of a model that has the module itself as well."""
        destination = args[0] if args else kwargs.get("destination")
        models = [model for model, names in _running("state_dict") if names.get("destination") is destination]
        if destination is not None and models and self._is_beside(models[-1]):
            return destination
        return self.module.state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load the module's own weights; leave them to the module itself if the model has that as well."""
        model, _ = next(_running("load_state_dict"), (None, None))
        missing = not any(name.startswith(prefix) for name in state_dict)
        if missing and model is not None and self._is_beside(model):
            state_dict |= {prefix + name: tensor for name, tensor in self.module.state_dict(keep_vars=True).items()}
        self.module._load_from_state_dict(state_dict, prefix, *rest)

    def _is_beside(self, model: nn.Module) -> bool:
        """Return True if a model has the module itself as a part."""
        return self.module in [*model.modules()]


def _running(method: str) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
    """Yield the modules whose method of this name runs, the innermost first, with its local variables.

    While torch saves or loads a model, it does not tell the parts which model that is.
    """
    code, frame = getattr(nn.Module, method).__code__, inspect.currentframe()
    while frame is not None:
        if frame.f_code is code:
            yield frame.f_locals["self"], frame.f_locals
        frame = frame.f_back
