"""CPU seconds of the quick commands before they answer; nearly all of it is imports."""
