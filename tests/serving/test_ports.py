"""Free ports for servers that start later."""

import socket

from cluster.local.ports import OUTGOING, free_ports


def test_ports_are_free_and_no_outgoing_connection_takes_them() -> None:
    ports = free_ports(20, "127.0.0.1")
    assert len(set(ports)) == 20
    first_outgoing = int(OUTGOING.read_text().split()[0])
    assert all(port < first_outgoing for port in ports)
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()
