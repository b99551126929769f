"""All cheats and controls, by name."""

from tests.cheats.assertion_tricks import tricks, weak_tests
from tests.cheats.cheat_target import Cheat, Control
from tests.cheats.early_endings import endings
from tests.cheats.honest_changes import controls
from tests.cheats.result_forgers import forgers
from tests.cheats.runner_files import files

IN_CODE: tuple[Cheat, ...] = (*forgers(), *endings(), *tricks())
"""Those that only add code to the package under test."""
CHEATS: tuple[Cheat, ...] = (*IN_CODE, *files())
"""Each must score 0."""
WEAK: tuple[Cheat, ...] = tuple(weak_tests())
"""They give what the hidden tests ask, as a fix does: no mechanism can refuse them."""
CONTROLS: tuple[Control, ...] = tuple(controls())
