"""pyarrow for a child process of a gateway or a worker, which needs little of it.

What is set here holds for a whole process, so nobody else calls it: in a trainer's process pandas and
pyarrow's memory are the trainer's.
"""

import os
import sys

from perdure import lean_imports


def set_up() -> None:
    """Import pyarrow so that it takes little memory; repeating is harmless.

    Its own allocator keeps memory for each thread. And before its first value it imports pandas
    wherever that is installed, unless pandas cannot be found just then.
    """
    os.putenv("ARROW_DEFAULT_MEMORY_POOL", "system")  # read when pyarrow first needs memory
    import pyarrow

    if "pandas" in sys.modules:
        return
    with lean_imports.without("pandas"):
        pyarrow.array([0])
