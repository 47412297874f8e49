"""Tests of the plugins, which are distributions of their own."""
