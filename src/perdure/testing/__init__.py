"""An inference server without a model, and contract suites, for users and plug-in authors."""
