"""The live page: what it shows, and the same as HTML and as text."""
