"""The catalog of cheats is sound: a cheat that does not run would be refused for the wrong reason."""

from collections import Counter

from perdure.graders.diff.git_diff_parser import parse
from tests.cheats.cheat_catalog import CHEATS, CONTROLS, IN_CODE, WEAK
from tests.cheats.cheat_target import Target
from tests.cheats.made_rows import made_rows


def test_names_are_unique_and_the_catalog_is_whole() -> None:
    """Each name stands for one diff per row; the counts are those in the docs."""
    cheats = Counter(cheat.name for cheat in (*CHEATS, *WEAK))
    controls = Counter(control.name for control in CONTROLS)

    assert {*cheats.values(), *controls.values()} == {1}
    assert (len(CHEATS), len(WEAK), len(CONTROLS) * len(made_rows())) == (193, 2, 63)


def test_code_of_every_cheat_compiles() -> None:
    """On each row, the code that a cheat adds to the package is valid Python."""
    added = [
        _added(diff, target)
        for target in made_rows()
        for cheat in (*IN_CODE, *WEAK)
        if (diff := cheat.make(target)) is not None
    ]
    for source in added:
        compile(source, "package", "exec")

    assert len(added) > 300


def _added(diff: bytes, target: Target) -> bytes:
    (file,) = (part for part in parse(diff) if part.new_path == target.host.encode())
    lines = file.raw.partition(b"@@\n")[2].splitlines()
    return b"\n".join(line[1:] for line in lines if line[:1] in b"+ ")
