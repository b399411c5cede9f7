"""What crossed the wire: calls, rows and bytes of every collective, by operation and group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Traffic:
    """What one rank handed to one operation over one group.

    Attributes:
        calls: how often the collective ran.
        rows: rows for other ranks.
        bytes: bytes for other ranks. An all_reduce counts its tensor once: how often that crosses is up to the backend.
        own_rows, own_bytes: what the rank handed over for itself, which crosses nothing.
        bytes_to: bytes for each rank of the group, the own part included; empty for an all_reduce.
    """

    calls: int = 0
    rows: int = 0
    bytes: int = 0
    own_rows: int = 0
    own_bytes: int = 0
    bytes_to: list[int] = field(default_factory=list)


class CommunicationCounter:
    """Counts collectives by (operation, group). Whoever wants to know creates one, hands it on and reads it.

    `ProcessGroups.build` makes one for its job, `groups.counter`, into which every collective of this library counts.
    Counting is arithmetic on sizes that the host knows: no collective, no host sync.

    Attributes:
        records: Traffic by (operation, group name), for example ("all_to_all dispatch rows", "ep").
    """

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], Traffic] = {}

    def add_rows(self, operation: str, group: str, rank: int, rows_to: Sequence[int], row_bytes: int) -> None:
        """Count a collective that hands rows to each rank.

        Args:
            operation: what ran.
            group: the name of the group.
            rank: this rank in the group.
            rows_to: rows for each rank of the group.
            row_bytes: bytes of one row.
        """
        traffic = self.records.setdefault((operation, group), Traffic())
        num_rows = sum(rows_to) - rows_to[rank]
        traffic.calls += 1
        traffic.rows += num_rows
        traffic.bytes += num_rows * row_bytes
        traffic.own_rows += rows_to[rank]
        traffic.own_bytes += rows_to[rank] * row_bytes
        known = traffic.bytes_to or [0] * len(rows_to)
        traffic.bytes_to = [before + rows * row_bytes for before, rows in zip(known, rows_to, strict=True)]

    def add_reduced(self, operation: str, group: str, num_bytes: int) -> None:
        """Count an all_reduce of a tensor of num_bytes."""
        traffic = self.records.setdefault((operation, group), Traffic())
        traffic.calls += 1
        traffic.bytes += num_bytes

    def total(self, part: str = "", group: str | None = None) -> Traffic:
        """Return the sum over the operations whose name contains `part`, over one group or over all."""
        found = [t for (name, where), t in self.records.items() if part in name and group in (None, where)]
        return Traffic(
            sum(t.calls for t in found),
            sum(t.rows for t in found),
            sum(t.bytes for t in found),
            sum(t.own_rows for t in found),
            sum(t.own_bytes for t in found),
        )

    def reset(self) -> None:
        """Forget everything counted so far."""
        self.records.clear()

    def table(self) -> str:
        """Return one line per operation and group."""
        lines = [f"{'operation':40} {'group':10} {'calls':>8} {'rows':>12} {'bytes':>16}"]
        for (operation, group), t in sorted(self.records.items()):
            lines.append(f"{operation:40} {group:10} {t.calls:8,} {t.rows:12,} {t.bytes:16,}")
        return "\n".join(lines)

    def __deepcopy__(self, memo: dict[int, Any]) -> CommunicationCounter:
        """A copy of a layer counts where the layer does."""
        return self
