"""What holds for every unit test: drawn examples are the same in each run, and no clock judges them.

`--hypothesis-profile=default` draws others, against Hypothesis's own clock.
"""

from hypothesis import settings

settings.load_profile("ci")
