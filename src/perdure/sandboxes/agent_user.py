"""The user that commands run as inside a sandbox: its ids, its home folder, its variables."""

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""PATH of commands in a sandbox, and of the host programs that create one."""

USER_ID = 1000
HOME = "/home/agent"

ENVIRONMENT = {
    "HOME": HOME,
    "LANG": "C.UTF-8",
    "LOGNAME": "agent",
    "PATH": SYSTEM_PATH,
    "SHELL": "/bin/bash",
    "USER": "agent",
}
ROOT_VARIABLES = {"USER": "root", "LOGNAME": "root"}
"""Variables that differ when commands run as root of the instance's own image."""
