"""`python -m workers.agent`: polls for the agent role only."""

from workers.process import main

if __name__ == "__main__":
    main("agent")
