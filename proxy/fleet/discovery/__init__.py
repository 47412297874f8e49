"""Sources that find instances at run time: one module per kind."""
