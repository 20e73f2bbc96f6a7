"""A door's book as the configuration wants it."""

from cluster.clock import Clock
from cluster.config import CaesuraConfig
from cluster.ledger_store import LedgerStore
from cluster.observing.shared_ledger import SharedLedger
from cluster.observing.turns import TurnBook


def turn_book(config: CaesuraConfig, clock: Clock, *, doors: int) -> TurnBook:
    """The book of one of so many doors.

    Raises:
        ConfigError: the store's URL cannot be used.
    """
    if doors == 1 or not config.metrics.enabled:
        return TurnBook(config, clock)
    idle_s = config.control.idle_program_s
    # Longer than idle, so that it is still there when a door asks about a program that has been idle for so long.
    store = LedgerStore(config.store.url, timeout_s=config.store.timeout_s, expiry_s=2 * idle_s, clock=clock)
    return TurnBook(config, clock, SharedLedger(store, clock, idle_s))
