"""Work that is slow to import or to compute, in a child process of its own."""
