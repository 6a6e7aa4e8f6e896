"""What became of every example on its way into rows: nothing is rejected, cut or filtered in silence.

`Report.counts` has the totals, `Report.events` every example to which something happened, where it came from and why.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

REASONS = ("rejected", "dropped", "truncated", "split", "rows_without_target", "filtered")


class Event(NamedTuple):
    """Something that happened to one example. `index` is a line number (from 1) in JSONL, else a row (from 0)."""

    source: str
    index: int
    reason: str  # one of REASONS
    why: str


@dataclass
class Report:
    """Counts and events. What `counts` holds, all of it integers:

    `examples` read; `documents` rendered; `rejected` (could not be used); `dropped` (over-long); `truncated`; `split`
    (documents cut into several); `rows_without_target` (documents or parts with nothing to predict, left out);
    `filtered` (instances that the instance filter removed); `targets_lost` (supervised tokens that a cut removed or
    left without a predecessor); `targets_filtered` (supervised tokens of removed instances); `rows`; `pieces`
    (documents and parts of documents in the rows); `tokens`, `supervised` and `padding` positions of the rows; `shared`
    (positions that prefix sharing saved)."""

    counts: Counter[str] = field(default_factory=Counter)
    events: list[Event] = field(default_factory=list)

    def add(self, source: str, index: int, reason: str, why: str, count: int = 1) -> None:
        """List one example under `reason`, and count it (`count=0`: it is part of what was counted already)."""
        self.counts[reason] += count
        self.events.append(Event(source, index, reason, why))

    def select(self, reason: str | None = None) -> list[Event]:
        """The events, or those of one reason."""
        if reason is not None and reason not in REASONS:
            raise ValueError(f"reason={reason!r} is not one of {', '.join(REASONS)}")
        return [e for e in self.events if reason in (None, e.reason)]

    def to_dict(self) -> dict[str, int]:
        """The counts as a plain dictionary, zeros of all reasons included, for run cards and metrics."""
        return {**{reason: 0 for reason in REASONS}, **self.counts}

    def __str__(self) -> str:
        lines = [", ".join(f"{name} {n:,}" for name, n in self.to_dict().items() if n or name == "rejected")]
        lines += [f"  {e.reason}: {e.source}, {e.index}: {e.why}" for e in self.events[:10]]
        if len(self.events) > 10:
            lines.append(f"  ... and {len(self.events) - 10:,} more, see report.select()")
        return "\n".join(lines)
