"""What a conversion of a trace does not carry over, with the number of times that it happened."""

from collections import Counter


class Losses:
    """Counts what is lost, by a text that says what it is and of what it is counted."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, what: str, count: int = 1) -> None:
        """Count ``what`` as lost ``count`` times. A count of 0 is not reported."""
        self._counts[what] += count

    def counts(self) -> dict[str, int]:
        """Return the count of each loss that happened, in the order of the first time."""
        return {what: count for what, count in self._counts.items() if count}

    def lines(self) -> list[str]:
        """Return one line for each loss, with its count."""
        return [f"lost: {what}: {count}" for what, count in self.counts().items()]
