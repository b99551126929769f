"""`python -m workers.workflows`: polls for the workflows role only."""

from workers.process import main

if __name__ == "__main__":
    main("workflows")
