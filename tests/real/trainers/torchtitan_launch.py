"""TorchTitan's launcher reads document 004's variables and flags. Prints JSON: what it would run.

PROMPT_DATA=... HF_ASSETS_PATH=... python tests/real/trainers/torchtitan_launch.py OPTION...
"""

# mypy: ignore-errors

import absent

absent.stand_in(absent.TORCHTITAN)

import json  # noqa: E402
import sys  # noqa: E402

from torchtitan.config import ConfigManager  # noqa: E402


def main(*options):
    config = ConfigManager().parse_args(list(options))
    rollouter = config.rollouter.build()
    return {
        "assets": config.hf_assets_path,
        "size": config.model_spec.flavor,
        "sandbox": config.rollouter.rollout.sandbox,
        "agent": config.rollouter.rollout.agent,
        "rows": config.rollouter.train_dataset.path,
        "dataset": rollouter._fields["dataset"],
        "run_id": rollouter._fields["run_id"],
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
