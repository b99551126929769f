"""The protocols that agents and hosted engines speak, one file each."""
