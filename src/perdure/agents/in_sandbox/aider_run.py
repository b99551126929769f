"""Starts aider's own command line, with the cache of its repository map outside the repository.

It runs in the agent's own Python in the sandbox, where Perdure is not installed.
"""

import os
import sys


def main() -> None:
    from aider.main import main as aider  # type: ignore[import-not-found]
    from aider.repomap import RepoMap  # type: ignore[import-not-found]

    RepoMap.TAGS_CACHE_DIR = os.path.expanduser("~/tags-cache")  # otherwise part of the diff
    sys.exit(aider())


if __name__ == "__main__":
    main()
