"""What a server says of itself at /metrics: samples by name and labels, rates and percentiles between two readings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

Labels = Mapping[str, str]
Samples = dict[str, list[tuple[Labels, float]]]


def parse(text: str) -> Samples:
    """All samples of Prometheus' text format.

    Raises:
        ValueError: it is not that.
    """
    found: Samples = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, float(sample.value)))
    except (ValueError, IndexError, KeyError) as error:  # the parser does not say which a bad line gives
        raise ValueError(f"not Prometheus' text format: {error}") from error
    return found


@dataclass(frozen=True, slots=True)
class Reading:
    """What a server said at one time.

    Attributes:
        time: seconds of a clock that goes on evenly.
        prefix: of the names, with the colon.
    """

    time: float
    samples: Samples
    prefix: str

    @classmethod
    def of(cls, time: float, text: str) -> Reading:
        """From the text.

        Raises:
            ValueError: it is not Prometheus' format, or not of a server of language models.
        """
        samples = parse(text)
        prefixes = [n.removesuffix("num_requests_running") for n in samples if n.endswith(":num_requests_running")]
        prefixes += [n.removesuffix("request_success_total") for n in samples if n.endswith(":request_success_total")]
        if not prefixes:
            raise ValueError("these are not the metrics of a server of language models")
        return cls(time, samples, prefixes[0])

    def value(self, name: str, **labels: str) -> float | None:
        """The sum over all samples with these labels; None if there is none."""
        values = [v for own, v in self.samples.get(self.prefix + name, ()) if labels.items() <= own.items()]
        return sum(values) if values else None

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums by the value of a label."""
        found: dict[str, float] = {}
        for own, value in self.samples.get(self.prefix + name, ()):
            if label in own:
                found[own[label]] = found.get(own[label], 0.0) + value
        return found

    def label(self, name: str) -> str | None:
        """The first value of a label that is found."""
        for rows in self.samples.values():
            for own, _ in rows:
                if name in own:
                    return own[name]
        return None


class Difference:
    """From one reading to a later one. Counters that went back, as after a restart, count from 0."""

    def __init__(self, before: Reading, now: Reading) -> None:
        self.now = now
        self._before = before
        self.seconds = max(now.time - before.time, 1e-9)

    def _grown(self, read: Callable[[Reading], float | None]) -> float | None:
        new, old = read(self.now), read(self._before)
        if new is None:
            return None
        return new - old if old is not None and old <= new else new

    def grown(self, name: str, **labels: str) -> float | None:
        """How much a counter has grown; None if there is none."""
        return self._grown(lambda r: r.value(name, **labels))

    def rate(self, name: str, **labels: str) -> float | None:
        """The same for each second."""
        grown = self.grown(name, **labels)
        return None if grown is None else grown / self.seconds

    def rates(self, name: str, label: str) -> dict[str, float]:
        """By the value of a label."""
        return {value: self.rate(name, **{label: value}) or 0.0 for value in self.now.by(name, label)}

    def share(self, part: str, whole: str) -> float | None:
        """One counter's growth as a part of another's; None if that has not grown."""
        a, b = self.grown(part), self.grown(whole)
        return a / b if a is not None and b else None

    def buckets(self, name: str) -> list[tuple[float, float]]:
        """Upper bounds of a histogram and how many values were added up to each."""
        rows = []
        for text in self.now.by(f"{name}_bucket", "le"):
            rows.append((float(text), self.grown(f"{name}_bucket", le=text) or 0.0))
        return sorted(rows)

    def mean(self, name: str) -> float | None:
        """Of the values that were added to a histogram."""
        return self.share(f"{name}_sum", f"{name}_count")


def percentile(buckets: list[tuple[float, float]], p: float) -> float | None:
    """As Prometheus' ``histogram_quantile``: even within a bucket; beyond the last bound that bound.

    Args:
        buckets: upper bounds, rising, and cumulative counts; the last bound is infinite.
        p: from 0 to 100.
    """
    if not buckets or buckets[-1][1] <= 0:
        return None
    rank = p / 100 * buckets[-1][1]
    low, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= rank and count > below:
            if math.isinf(bound):
                return low
            return low + (bound - low) * (rank - below) / (count - below)
        low, below = bound, count
    return low
