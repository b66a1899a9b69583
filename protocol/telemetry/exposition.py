"""Writes metrics in the text format that a scraper accepts.

Prometheus' text format is the default. A scraper that prefers OpenMetrics receives
OpenMetrics. Only OpenMetrics can express exemplars, which have trace ids.
"""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

_PREFIX = "baton_"  # the prefix of all metric families that Baton defines
_OPEN_METRICS_TYPE = "application/openmetrics-text"
_TEXT_TYPES = ("text/plain", "text/*", "*/*")

# Returns families that are computed from the given families. The first argument maps
# names to families. The second has the labels that all series have in common.
DeriveFamilies = Callable[[Mapping[str, Metric], Mapping[str, str]], Iterable[Metric]]


class LabelledCollector(Collector):
    """Collects the families of `source`, with labels that all of Baton's series share.

    The labels are added here, not when a series is counted, so that they cost nothing
    per request.

    Args:
        labels: The shared labels and their values.
        derive: Returns the derived families, which follow the families of `source`.
            None: there are no derived families.
        only_derived: Add the labels to the derived families only.
    """

    def __init__(
        self,
        source: Collector,
        *,
        labels: Mapping[str, str],
        derive: DeriveFamilies | None = None,
        only_derived: bool = False,
    ) -> None:
        self._source = source
        self._labels = labels
        self._derive = derive
        self._only_derived = only_derived

    def collect(self) -> Iterable[Metric]:
        families = {family.name: family for family in self._source.collect()}
        for family in families.values():
            is_ours = family.name.startswith(_PREFIX)
            if self._labels and is_ours and not self._only_derived:
                family.samples = [
                    sample._replace(labels={**sample.labels, **self._labels})
                    for sample in family.samples
                ]
            yield family
        if self._derive is not None:
            yield from self._derive(families, self._labels)


def encode(collector: Collector, accept: str) -> tuple[bytes, str]:
    """Returns the metrics of a collector, and their content type.

    Args:
        accept: The scraper's Accept header; empty if it sent none.
    """
    if not _prefers_open_metrics(accept):
        return generate_latest(collector), CONTENT_TYPE_PLAIN_0_0_4
    # All metric names are valid without escaping. With another value of `escaping`,
    # prometheus_client 0.26 would replace the colon in the names of samples.
    text: bytes = openmetrics.generate_latest(  # type: ignore[no-untyped-call]
        collector, escaping=openmetrics.ALLOWUTF8
    )
    return text, openmetrics.CONTENT_TYPE_LATEST


def _prefers_open_metrics(accept: str) -> bool:
    """Returns whether a scraper prefers OpenMetrics 1 to the text format.

    Scrapers list the formats in the order of their preference, so weights (q) in the
    Accept header are ignored.
    """
    for entry in accept.split(","):
        media_type, *parameters = (part.strip() for part in entry.split(";"))
        if media_type in _TEXT_TYPES:
            return False
        if media_type == _OPEN_METRICS_TYPE:
            versions = [text for text in parameters if text.startswith("version=")]
            if all(text.startswith("version=1.") for text in versions):
                return True
    return False
