"""One supervised worker per node through Slurm: `perdure workers up --slurm`."""
