"""The builtin plugins that propose targets."""
