"""`python -m workers.grade`: polls the grade stage only."""

from workers.process import main

if __name__ == "__main__":
    main("grade")
