"""An inference server without a model, and the contract suites: for users and for authors of plug-ins."""
