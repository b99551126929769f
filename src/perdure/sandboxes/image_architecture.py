"""Whether a host runs the programs of an image, by the architecture that the image names."""

from pathlib import Path

from perdure.errors import InstanceError

EMULATORS = Path("/proc/sys/fs/binfmt_misc")
"""Where a kernel lists its emulators. Containers see it only if it is mounted in them."""
NAMES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "386"}
"""The kernel's name of an architecture -> the name in images. The others have one name."""
ALSO_RUNS = {"amd64": "386", "arm64": "arm"}
RUN_ELSEWHERE = (
    "run the workers in a VM of the image's architecture, or use --sandbox kubernetes on such nodes"
)


def check_architecture(image: str, architecture: str, machine: str) -> None:
    """`architecture`: as the image names it, such as `arm64`; empty if it names none. `machine`:
    this host's architecture, as its kernel names it.

    Raises: InstanceError if neither the host nor an emulator of its kernel runs the image's programs.
    """
    own = NAMES.get(machine, machine)
    if architecture in ("", own, ALSO_RUNS.get(own)):
        return
    kernel_name = next((name for name, its in NAMES.items() if its == architecture), architecture)
    emulator = EMULATORS / f"qemu-{kernel_name}"
    if not emulator.exists():
        raise InstanceError(
            f"image {image!r} is for {architecture}, and this host is {own}: {RUN_ELSEWHERE}, or "
            f"install an emulator (Debian: qemu-user-static) that the worker sees as {emulator}"
        )
