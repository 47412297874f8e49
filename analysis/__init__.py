"""`analyze`: reports of replayed runs, and policies compared in virtual time."""
