"""`python -m workers.workflows`: polls the workflows stage only."""

from workers.process import main

if __name__ == "__main__":
    main("workflows")
