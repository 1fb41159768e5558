"""Format metrics as the text that Prometheus scrapes.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from varlen_graphs.errors import InputError

NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


class Metric(NamedTuple):
    """A metric and its samples."""

    name: str  # without the prefix; that of a counter ends in `_total`
    help: str
    labels: Sequence[str]
    samples: Sequence[tuple[Sequence[object], float]]  # the values of the labels, and the number

    @property
    def type(self) -> str:
        """`"counter"`, or `"gauge"` for numbers that may fall."""
        return "counter" if self.name.endswith("_total") else "gauge"


Source = tuple[Sequence[Metric], Mapping[str, object]]
"""Metrics of one encoder, and labels of all their samples."""


def exposition(sources: Sequence[Source], prefix: str) -> str:
    """Format metrics, each name once with the samples of all sources; those without samples are left out."""
    if not NAME.fullmatch(prefix):
        raise InputError(f"prefix {prefix!r}: expected letters, digits, '_' and ':', not starting with a digit")
    found: dict[str, tuple[Metric, list[str]]] = {}
    for metrics, labels in sources:
        _check_labels(labels, {label for metric in metrics for label in metric.labels})
        for metric in metrics:
            _, lines = found.setdefault(metric.name, (metric, []))
            for values, value in metric.samples:
                given = [*labels.items(), *zip(metric.labels, values, strict=True)]
                pairs = ",".join(f'{label}="{_quoted(text)}"' for label, text in given)
                lines.append(
                    f"{prefix}_{metric.name}{{{pairs}}} {value}" if pairs else f"{prefix}_{metric.name} {value}"
                )
    text = []
    for name, (metric, lines) in found.items():
        if lines:
            text += [f"# HELP {prefix}_{name} {_escaped(metric.help)}", f"# TYPE {prefix}_{name} {metric.type}", *lines]
    return "".join(f"{line}\n" for line in text)


def _check_labels(labels: Mapping[str, object], own: Collection[str]) -> None:
    for label in labels:
        if not LABEL.fullmatch(label):
            raise InputError(f"label {label!r}: expected letters, digits and '_', not starting with a digit or '__'")
        if label in own:
            raise InputError(f"label {label!r} is a label of the metrics themselves: use another name")


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _quoted(value: object) -> str:
    return _escaped(str(value)).replace('"', r"\"")
