"""The smoke command of Perdure's rollouter, where TorchTitan's packages for a GPU are absent."""

# mypy: ignore-errors

import absent

absent.stand_in(absent.TORCHTITAN)

import sys  # noqa: E402

from perdure.integrations.torchtitan import smoke  # noqa: E402

if __name__ == "__main__":
    sys.exit(smoke.main())
