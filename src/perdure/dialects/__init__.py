"""The wire formats that agents and hosted engines speak, one file per format."""
