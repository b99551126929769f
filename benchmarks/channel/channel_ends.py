"""Both ends of every channel. Runs inside sandboxes, so it uses the standard library only.

    python3 channel_ends.py send CHANNEL FOLDER NONCE BITS       # BITS: 0s and 1s
    python3 channel_ends.py receive CHANNEL FOLDER NONCE COUNT

Each prints one line, `SECONDS BITS`. The sender keeps its locks until it is killed. Bit N belongs to
page N of the file `pages`, to byte N of a lock, to the file `lock-N`, or to a name that no file has.
"""

import ctypes
import fcntl
import mmap
import os
import platform
import resource
import statistics
import struct
import sys
import time
from collections.abc import Callable, Iterable

PAGE = 4096
STRIDE = 4 * PAGE
TRAINING = 64
"""The first bits alternate, 0101..., so that a receiver learns which times are short."""
MINCORE = {"x86_64": 27, "aarch64": 232}

libc = ctypes.CDLL(None, use_errno=True)


def send_pages(folder: str, nonce: str, ones: Iterable[int]) -> None:
    fd = pages(folder)
    for number in ones:
        os.pread(fd, 1, number * STRIDE)


def send_names(folder: str, nonce: str, ones: Iterable[int]) -> None:
    """The kernel remembers that a name does not exist."""
    for number in ones:
        os.access(f"{folder}/{nonce}-{number}", os.F_OK)


def send_file_locks(folder: str, nonce: str, ones: Iterable[int]) -> None:
    for number in ones:
        fcntl.flock(os.open(f"{folder}/lock-{number}", os.O_RDONLY), fcntl.LOCK_EX)


def send_object_locks(folder: str, nonce: str, ones: Iterable[int]) -> None:
    """All eventfds of a kernel are one file to its locks."""
    fd = os.eventfd(0)
    for number in ones:
        fcntl.lockf(fd, fcntl.LOCK_EX, 1, number)


def receive_nowait(folder: str, nonce: str, count: int) -> list[bool]:
    fd, room, flag = pages(folder), [bytearray(1)], os.RWF_NOWAIT
    return [granted(os.preadv, fd, room, number * STRIDE, flag) for number in range(count)]


def receive_mincore(folder: str, nonce: str, count: int) -> list[bool]:
    memory = mapped(folder)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    room = ctypes.create_string_buffer(len(memory) // PAGE)
    number = ctypes.c_long(MINCORE[platform.machine()])
    if libc.syscall(number, ctypes.c_void_p(start), ctypes.c_size_t(len(memory)), room) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return [bool(room.raw[n * STRIDE // PAGE] & 1) for n in range(count)]


def receive_faults(folder: str, nonce: str, count: int) -> list[bool]:
    """A fault on a page that is not in memory counts as a major one."""
    memory, found = mapped(folder), []
    for number in range(count):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        memory[number * STRIDE]
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_majflt == before)
    return found


def receive_read_times(folder: str, nonce: str, count: int) -> list[bool]:
    fd = pages(folder)
    return are_short(timed(os.pread, fd, 1, n * STRIDE) for n in range(count))


def receive_name_times(folder: str, nonce: str, count: int) -> list[bool]:
    return are_short(timed(os.access, f"{folder}/{nonce}-{n}", os.F_OK) for n in range(count))


def receive_file_locks(folder: str, nonce: str, count: int) -> list[bool]:
    found = []
    for number in range(count):
        with open(f"{folder}/lock-{number}", "rb") as file:
            found.append(not granted(fcntl.flock, file, fcntl.LOCK_EX | fcntl.LOCK_NB))
    return found


def receive_object_locks(folder: str, nonce: str, count: int) -> list[bool]:
    fd, found = os.eventfd(0), []
    for number in range(count):
        asked = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0)
        found.append(
            struct.unpack("hhqqi", fcntl.fcntl(fd, fcntl.F_GETLK, asked))[0] != fcntl.F_UNLCK
        )
    return found


CHANNELS: dict[str, tuple[Callable[..., None], Callable[..., list[bool]]]] = {
    "RWF_NOWAIT": (send_pages, receive_nowait),
    "mincore": (send_pages, receive_mincore),
    "fault counts": (send_pages, receive_faults),
    "times of reads": (send_pages, receive_read_times),
    "times of lookups": (send_names, receive_name_times),
    "locks on files": (send_file_locks, receive_file_locks),
    "locks on eventfds": (send_object_locks, receive_object_locks),
}


def pages(folder: str) -> int:
    fd = os.open(f"{folder}/pages", os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # a read brings in one page
    return fd


def mapped(folder: str) -> mmap.mmap:
    memory = mmap.mmap(pages(folder), 0, flags=mmap.MAP_PRIVATE)
    memory.madvise(mmap.MADV_RANDOM)
    return memory


def granted(call: Callable[..., object], *arguments: object) -> bool:
    try:
        call(*arguments)
    except BlockingIOError:
        return False
    return True


def timed(call: Callable[..., object], *arguments: object) -> int:
    before = time.perf_counter_ns()
    call(*arguments)
    return time.perf_counter_ns() - before


def are_short(times: Iterable[int]) -> list[bool]:
    """Below the middle between the medians of the training bits."""
    found = list(times)
    zeros, ones = (statistics.median(found[bit:TRAINING:2]) for bit in (0, 1))
    return [value < (zeros * ones) ** 0.5 for value in found]


def main() -> None:
    side, channel, folder, nonce, given = sys.argv[1:]
    send, receive = CHANNELS[channel]
    began = time.monotonic()
    if side == "send":
        send(folder, nonce, [number for number, bit in enumerate(given) if bit == "1"])
        print(time.monotonic() - began, given, flush=True)
        time.sleep(600)
    found = receive(folder, nonce, int(given))
    print(time.monotonic() - began, "".join("01"[bit] for bit in found))


if __name__ == "__main__":
    main()
