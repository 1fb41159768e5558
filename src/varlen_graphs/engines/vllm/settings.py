"""Settings of an engine: the entry `varlen_graphs` of vLLM's `--additional-config`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.logger import init_logger

from varlen_graphs.budgets.ladder import Ladder
from varlen_graphs.checks.values import quoted
from varlen_graphs.errors import SpecError

NAME = "varlen_graphs"
OPTIONS = ("backend", "memory", "verify")

LINE = 600
"""Most characters of a reason in the log, which is one line."""

logger = init_logger("vllm.varlen_graphs")


@dataclass(frozen=True)
class Settings:
    """Options of the graphs of an engine.

    Attributes:
        budgets: Row counts or a ladder for all towers; `None` uses the ladder of each.
        options: Other arguments of `GraphedEncoder`.
    """

    budgets: list[int] | Ladder | None = None
    options: dict[str, Any] = field(default_factory=dict)


def read_settings(config: VllmConfig | None) -> Settings | None:
    """Return the settings of an engine; `None` if it does not switch the library on, or graphs its encoders itself.

    Raises:
        SpecError: They are neither true, false nor an object with known keys.
    """
    additional = {} if config is None else config.additional_config
    given = additional.get(NAME, False) if isinstance(additional, Mapping) else False
    if given is False or config is None:
        return None
    if given is True:
        given = {}
    if not isinstance(given, Mapping) or not given.keys() <= {"budgets", *OPTIONS}:
        raise SpecError(
            f'--additional-config has {quoted(given)} as "{NAME}": expected true, false, or an object with some of '
            f"budgets, {', '.join(OPTIONS)}"
        )
    compilation = config.compilation_config
    for name in ("cudagraph_mm_encoder", "compile_mm_encoder"):
        if getattr(compilation, name):
            logger.warning_once(
                "varlen_graphs leaves encoders to vLLM, whose %s is on and would capture or compile them a second "
                "time: expected it off; try --compilation-config without it",
                name,
            )
            return None
    if envs.VLLM_BATCH_INVARIANT:
        logger.warning_once(
            "varlen_graphs leaves encoders to vLLM: VLLM_BATCH_INVARIANT=1 asks for the same bits whatever is in a "
            "batch, but the last bits of a tower depend on the size of its graph; expected it off"
        )
        return None
    options = {name: given[name] for name in OPTIONS if name in given}
    return Settings(_budgets(given.get("budgets")), options)


def _budgets(given: Any) -> list[int] | Ladder | None:
    """Return budgets given as JSON: row counts, or the arguments of a `Ladder`."""
    if given is None or isinstance(given, list):
        return given
    try:
        return Ladder(**given)
    except TypeError as error:
        raise SpecError(
            f'"budgets" are {quoted(given)}: expected a list of row counts, or an object with arguments of Ladder, '
            f'such as {{"min": 256, "max": 16384, "step": 1.02}} ({error})'
        ) from error
