"""How many bits a second one sandbox can tell another through files that both only read."""
