"""Runs a program in a network namespace with only a loopback interface, where a port leads to a
proxy.

python -m perdure.sandboxes.host.build_network PORT SOCKET PROGRAM [ARGUMENT...]
"""

import fcntl
import os
import socket
import struct
import sys
from collections.abc import Sequence

from perdure.sandboxes.host.keeper import gateway_forwarder, linux_syscalls

SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1


def main(port: int, path: str, program: Sequence[str]) -> None:
    """Replaces this process. The forwarder ends with it."""
    linux_syscalls.unshare(linux_syscalls.CLONE_NEWNET)
    _bring_loopback_up()
    reader, writer = os.pipe()
    me = os.getpid()
    if os.fork() == 0:
        linux_syscalls.die_with_parent(me)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):  # readers of these streams wait until every holder has closed them
            os.dup2(nothing, stream)
        gateway_forwarder.serve(port, path, writer, [])
    os.close(writer)
    os.read(reader, 16)
    os.close(reader)
    os.execv(program[0], list(program))


def _bring_loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        found = fcntl.ioctl(any_socket, SIOCGIFFLAGS, request)
        flags = struct.unpack("16sh14x", found)[1] | IFF_UP
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
