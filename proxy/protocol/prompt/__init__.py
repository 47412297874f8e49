"""The prompt of a body: its rendered parts, and the facts for decisions."""
