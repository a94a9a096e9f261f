"""This host's address for other ranks: of a named network interface, or of the route to the coordinator."""

import socket

import psutil

from elche.errors import InvalidJob
from elche.network import own_address


def listening_address(coordinator: str, interface: str) -> str:
    """This host's address on the interface, or, if that is "", on the route to the coordinator."""
    return interface_address(interface) if interface else own_address(coordinator)


def interface_address(name: str) -> str:
    """The host's address on an interface, IPv4 before IPv6. Raises `InvalidJob` when it has none."""
    known = psutil.net_if_addrs()
    for family in (socket.AF_INET, socket.AF_INET6):
        for one in known.get(name, ()):
            if one.family is family:
                return str(one.address)
    there = ", ".join(sorted(known))
    raise InvalidJob(f"the network interface {name!r} has no address; the interfaces of this host are {there}")
