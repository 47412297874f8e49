"""The options: text in, checked values out."""
