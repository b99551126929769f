"""`python -m tests.hosts.some_roles`: one worker process with the roles that ROLES names."""

import os

from workers.process import main

if __name__ == "__main__":
    main(*os.environ["ROLES"].split())
