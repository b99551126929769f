"""What the command line costs before it answers: CPU seconds of the quick commands, nearly all imports."""
