"""`python -m workers.grade`: polls for the grade role only."""

from workers.process import main

if __name__ == "__main__":
    main("grade")
