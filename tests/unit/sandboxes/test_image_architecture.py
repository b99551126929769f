"""An image of another architecture is refused by name, unless the kernel has an emulator for it."""

from pathlib import Path

import pytest

from perdure.errors import InstanceError
from perdure.sandboxes import image_architecture
from perdure.sandboxes.guest.container_options import missing_programs_error, names_missing_program
from perdure.sandboxes.image_architecture import check_architecture


@pytest.fixture(autouse=True)
def emulators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(image_architecture, "EMULATORS", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("architecture", "machine"),
    [("amd64", "x86_64"), ("arm64", "aarch64"), ("386", "x86_64"), ("s390x", "s390x"), ("", "any")],
)
def test_an_image_of_this_architecture_is_accepted(architecture: str, machine: str) -> None:
    """So is a 32-bit one, and one that names none."""
    check_architecture("a/b:1", architecture, machine)


def test_another_architecture_is_named_with_what_to_do(emulators: Path) -> None:
    """Both architectures, and the three ways out."""
    with pytest.raises(InstanceError) as refused:
        check_architecture("a/b:1", "arm64", "x86_64")

    assert str(refused.value) == (
        "image 'a/b:1' is for arm64, and this host is amd64: run the workers in a VM of the "
        "image's architecture, or use --sandbox kubernetes on such nodes, or install an emulator "
        f"(Debian: qemu-user-static) that the worker sees as {emulators}/qemu-aarch64"
    )


def test_an_emulated_architecture_is_accepted(emulators: Path) -> None:
    """The kernel starts its programs by the emulator."""
    (emulators / "qemu-aarch64").touch()
    check_architecture("a/b:1", "arm64", "x86_64")

    with pytest.raises(InstanceError, match="for ppc64le"):
        check_architecture("a/b:1", "ppc64le", "x86_64")


def test_a_runtime_that_cannot_start_a_foreign_program_ends_the_instance() -> None:
    """The words of crun, where no image can be inspected first."""
    said = "crun: exec container process `/usr/bin/python3`: Exec format error"

    assert names_missing_program(said)
    assert "is for an architecture that its host cannot run" in str(
        missing_programs_error("box", said)
    )
