"""What the containers of `docker` and `kubernetes` share: first process, capabilities, system-call
filter, uploads, and the signs of an image without python3.
"""

import base64
from abc import abstractmethod
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from perdure.errors import InstanceError
from perdure.sandboxes.guest.sandbox import FOLDER, GuestSandbox
from perdure.sandboxes.host.keeper import seccomp
