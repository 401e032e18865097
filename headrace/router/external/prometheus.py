"""The little of Prometheus' text format that reading a server's load needs."""

from __future__ import annotations

import re

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Samples:
    """One page of metrics; the same name with several labels is summed."""

    def __init__(self, page: bytes) -> None:
        self._values: dict[str, float] = {}
        self._labels: dict[str, dict[str, str]] = {}
        for name, labels, value in _SAMPLE.findall(page.decode("utf-8", "replace")):
            try:
                number = float(value)
            except ValueError:
                continue
            self._values[name] = self._values.get(name, 0.0) + number
            if labels and name.endswith("_info"):
                self._labels[name] = dict(_LABEL.findall(labels))

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, *names: str) -> float:
        """The first of these that the page has; 0 if it has none."""
        return next((self._values[name] for name in names if name in self._values), 0.0)

    def labels(self, name: str) -> dict[str, str]:
        """The labels of an info metric."""
        return self._labels.get(name, {})
