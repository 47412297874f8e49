"""Programs that wrote the packaged traces, of which the project has only the results."""
