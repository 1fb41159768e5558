"""Outputs that modules of transformers return only if the call, or their configuration, asks for them."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from varlen_graphs.errors import SpecError
from varlen_graphs.outputs.declared import HIDDEN_STATES, Declared, Fields
from varlen_graphs.outputs.entries import Extent
from varlen_graphs.outputs.parts import Parts

OUTPUT_HIDDEN_STATES = "output_hidden_states"
"""The argument and setting that asks for the hidden states of all layers, or, by their indices, of some."""

OTHER_OUTPUTS = {
    OUTPUT_HIDDEN_STATES: True,
    "output_attentions": True,
    "output_router_logits": True,
    "return_dict": False,
}
"""Arguments and settings, with the values that ask for other outputs; graphs return hidden states if declared."""

_SETTINGS = [(name, f"_{name}", other) for name, other in OTHER_OUTPUTS.items()]
"""The same with the attributes of a configuration: some are properties, stored under a private name."""


_NAMES = [name for names in _SETTINGS for name in names[:2]]


def declares_hidden_states(declared: Declared, by_module: bool) -> bool:
    """Return True if a declaration covers hidden states: by name, or as one extent for all that the module returns.

    One extent does not tell whether a function in the place of the module returns them.
    """
    if isinstance(declared, Extent):
        return by_module
    return HIDDEN_STATES in (declared.fields if isinstance(declared, Fields) else declared)


def check_hidden_states(parts: Parts) -> None:
    """Check that the output of a function in the place of the module has the hidden states that it was asked for.

    Raises:
        SpecError: It has none.
    """
    if not any(HIDDEN_STATES in path for path in parts.paths):
        raise SpecError(
            f"forward= got {OUTPUT_HIDDEN_STATES}=, but its output has no {HIDDEN_STATES!r}, which are declared: "
            f"expected a function that returns them; or leave {HIDDEN_STATES!r} out of outputs=, so that such calls "
            "run eager"
        )


def with_hidden_states(
    arguments: Mapping[str, Any], module: nn.Module, parameter: inspect.Parameter | None
) -> Mapping[str, Any]:
    """Return arguments that ask for hidden states as the configuration does, if the call leaves that to it.

    `parameter` is that of the captured forward; `None` if it takes any arguments. A list of layers becomes a tuple.
    """
    name = OUTPUT_HIDDEN_STATES
    value = arguments.get(name)
    if isinstance(value, list):
        return {**arguments, name: tuple(value)}
    default = None if parameter is None else parameter.default
    if default is None and name not in arguments and (asked := hidden_states_by_config(module)):
        return {**arguments, name: asked}
    return arguments


def hidden_states_by_config(module: nn.Module) -> Any:
    """Return the setting of the configuration that asks for hidden states; `None` if there is none."""
    settings = _settings(module)
    return settings.get(OUTPUT_HIDDEN_STATES, settings.get(f"_{OUTPUT_HIDDEN_STATES}"))


def asked_by_config(arguments: Mapping[str, Any], module: nn.Module) -> str | None:
    """Return the setting of the configuration that asks for other outputs, unless the call overrides it.

    `None` in a call overrides it for some models of transformers, and leaves it to the configuration for others.
    """
    settings = _settings(module)
    for name, private, other in _SETTINGS:
        asked = settings.get(name, settings.get(private, not other))
        if bool(asked) is other and arguments.get(name) is None:
            return f"config.{name}={other}"
    return None


def settings_now(module: nn.Module) -> tuple[Any, ...]:
    """Return the settings that ask for other outputs, as a tuple that changes with them."""
    return tuple([tuple(one) if type(one) is list else one for one in map(_settings(module).get, _NAMES)])


def _settings(module: nn.Module) -> Mapping[str, Any]:
    """Return a dict, because attributes of a transformers configuration take a microsecond each."""
    try:
        settings: dict[str, Any] = object.__getattribute__(getattr(module, "config", None), "__dict__")
    except Exception:  # a class of one's own may raise anything when it is asked
        return {}
    return settings
