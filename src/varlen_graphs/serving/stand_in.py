"""A module that stands in for another one inside a model."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from varlen_graphs.errors import SpecError


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
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training"):
            vars(self).pop(name, None)

    @property
    def training(self) -> bool:
        """Mode of the module."""
        return self.module.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "module" in vars(self):  # nn.Module sets it before
            self.module.training = mode

    @property
    def _parameters(self) -> Any:
        return self.module._parameters

    @_parameters.setter
    def _parameters(self, value: Any) -> None:
        pass

    @property
    def _buffers(self) -> Any:
        return self.module._buffers

    @_buffers.setter
    def _buffers(self, value: Any) -> None:
        pass

    @property
    def _non_persistent_buffers_set(self) -> Any:
        return self.module._non_persistent_buffers_set

    @_non_persistent_buffers_set.setter
    def _non_persistent_buffers_set(self, value: Any) -> None:
        pass

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
        """Set an attribute of the stand-in itself, which registers nothing."""
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module."""
        if name == "module" or name.startswith("__"):  # not set yet, or a protocol that the module has for itself
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.module, name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's state dict; add nothing to a model's that has these weights by another name already."""
        destination = args[0] if args else kwargs.get("destination")
        if destination and _has(destination, self.module):
            return destination
        return self.module.state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load the module's own weights; keep them if the state dict has them by another name."""
        if not any(name.startswith(prefix) for name in state_dict):
            state_dict |= {prefix + name: tensor for name, tensor in self.module.state_dict(keep_vars=True).items()}
        self.module._load_from_state_dict(state_dict, prefix, *rest)


def _has(destination: Mapping[str, Any], module: nn.Module) -> bool:
    """Return True if a state dict has the weights of a module."""
    own = {tensor.data_ptr() for tensor in module.state_dict().values() if isinstance(tensor, Tensor)}
    return own <= {value.data_ptr() for value in destination.values() if isinstance(value, Tensor)}
