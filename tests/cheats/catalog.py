"""All cheats and controls, by name."""

from tests.cheats.controls import controls
from tests.cheats.endings import endings
from tests.cheats.files import files
from tests.cheats.forgers import forgers
from tests.cheats.target import Cheat, Control
from tests.cheats.tricks import tricks, weak_tests

IN_CODE: tuple[Cheat, ...] = (*forgers(), *endings(), *tricks())
"""Those that only add code to the package under test."""
CHEATS: tuple[Cheat, ...] = (*IN_CODE, *files())
"""Each must score 0."""
WEAK: tuple[Cheat, ...] = tuple(weak_tests())
"""They give what the hidden tests ask, as a fix does: no mechanism can refuse them."""
CONTROLS: tuple[Control, ...] = tuple(controls())
