"""Options without which no configuration is whole."""

NEEDED = ["--instances", "a:1"]
