"""Draws a captured terminal screen as SVG; CUT is left out of it (the folder of the checkout).

tmux capture-pane -e -p -t SESSION | python docs/pictures/render.py TITLE WIDTH CUT > PICTURE.svg
"""

import re
import sys

from rich.console import Console
from rich.text import Text

FONTS = "font-family: Fira Code, DejaVu Sans Mono, Menlo, Consolas, monospace"

title, width, cut = sys.argv[1:]
console = Console(record=True, width=int(width), file=sys.stderr, force_terminal=True)
console.print(Text.from_ansi(sys.stdin.read().replace(cut, "").rstrip()))
drawn = console.export_svg(title=title)
drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)  # no fonts from the web
drawn = drawn.replace("font-family: Fira Code, monospace", FONTS)
sys.stdout.write(re.sub(r"[ \t]+$", "", drawn, flags=re.MULTILINE))
