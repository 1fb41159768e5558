"""The text format that Prometheus scrapes.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from varlen_graphs.errors import InputError

NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


class Metric(NamedTuple):
    """Numbers of one kind.

    Attributes:
        name: Without the prefix. A counter's ends in `_total`.
        help: What is counted.
        labels: The names of the labels that tell its numbers apart.
        samples: Numbers, each with the values of these labels.
    """

    name: str
    help: str
    labels: Sequence[str]
    samples: Sequence[tuple[Sequence[object], float]]

    @property
    def type(self) -> str:
        """`"counter"`, or `"gauge"` for what may fall."""
        return "counter" if self.name.endswith("_total") else "gauge"


def exposition(metrics: Sequence[Metric], prefix: str, labels: Mapping[str, object]) -> str:
    """Metrics as text.

    Args:
        metrics: The metrics; those without samples are left out.
        prefix: What all names begin with, and an underscore.
        labels: Labels of every sample.

    Raises:
        InputError: The prefix or a label is no name that Prometheus takes, or a metric has that label itself, also
            where it has no samples yet.
    """
    if not NAME.fullmatch(prefix):
        raise InputError(f"prefix {prefix!r}: expected letters, digits, '_' and ':', and no digit first")
    own = {label for metric in metrics for label in metric.labels}
    for label in labels:
        if not LABEL.fullmatch(label):
            raise InputError(f"label {label!r}: expected letters, digits and '_', and no digit or '__' first")
        if label in own:
            raise InputError(f"label {label!r} is one that metrics have themselves: call it otherwise")
    lines = []
    for metric in metrics:
        if not metric.samples:
            continue
        name = f"{prefix}_{metric.name}"
        lines += [f"# HELP {name} {_escaped(metric.help)}", f"# TYPE {name} {metric.type}"]
        for values, value in metric.samples:
            given = [*labels.items(), *zip(metric.labels, values, strict=True)]
            pairs = ",".join(f'{label}="{_quoted(text)}"' for label, text in given)
            lines += [f"{name}{{{pairs}}} {value}" if pairs else f"{name} {value}"]
    return "".join(f"{line}\n" for line in lines)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _quoted(value: object) -> str:
    return _escaped(str(value)).replace('"', r"\"")
