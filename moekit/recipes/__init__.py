"""One readable training loop each, as functions of a config."""
