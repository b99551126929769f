"""`python -m workers.agent`: polls the agent stage only."""

from workers.process import main

if __name__ == "__main__":
    main("agent")
