"""Thermal control in virtual time, beside a baseline without it."""
