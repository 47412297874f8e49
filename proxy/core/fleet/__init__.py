"""Availability of instances: members, health, events, retries."""
