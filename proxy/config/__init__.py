"""Options: text in, checked values out."""
