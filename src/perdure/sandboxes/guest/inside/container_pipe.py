"""Connects its standard streams to a port on the container's loopback. Standard library only."""

import os
import socket
import sys
import threading


def main(port: int) -> None:
    connected = socket.create_connection(("127.0.0.1", port), timeout=10)
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    os.write(1, b"connected\n")
    threading.Thread(target=send, args=(connected,), daemon=True).start()
    while True:
        data = connected.recv(1 << 16)
        if not data:
            return
        while data:
            data = data[os.write(1, data) :]


def send(connected: socket.socket) -> None:
    while True:
        data = os.read(0, 1 << 16)
        if not data:  # the host has closed the connection
            os._exit(0)
        connected.sendall(data)


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]))
    except OSError:
        sys.exit(1)
