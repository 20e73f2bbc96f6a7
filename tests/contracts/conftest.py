"""What the tests of real engines share."""

from tests.fork_server import fork_server

__all__ = ["fork_server"]
