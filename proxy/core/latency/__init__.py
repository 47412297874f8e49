"""How long things take: prefill, decode steps, transfers; learned while serving."""
